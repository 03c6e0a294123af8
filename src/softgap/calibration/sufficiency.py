"""What suffices for each head: the cheapest kind of substitute that leaves little of softmax, at equal memory.

A kind *suffices* for a head if, over held-out text, it leaves at most a tenth of the output's energy,

    sum_t |l_t - o_t|^2 <= limit sum_t |o_t|^2,

and, where the mean of values is at a divergence of at least .02, at most a tenth of that gap. The energy sees norms,
the gap does not. Kinds are tried in the order of ``softgap.kinds.KINDS``; a head for which none suffices needs
softmax. Window, fitted map and hybrid keep equally many numbers per KV head (``softgap.attention.memory``). The profile
needs the values of the whole text; its memory is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

from softgap.attention import Mechanism, attend, compare_outputs, resolve
from softgap.attention.memory import keys_worth
from softgap.calibration.held_out import FIRST, NO_GAP
from softgap.errors import ValueInputError
from softgap.intervals import Interval
from softgap.kinds import QUICK_CALIBRATION, kinds_sentence
from softgap.models.loading import Model
from softgap.probe.layout import LayerTensors, head_dim, visit_layers
from softgap.trajectories.validation import BASELINE

__all__ = ["LIMIT", "KindErrors", "Sufficiency", "check_limit", "far_lengths", "label_heads", "measure_kinds"]

LIMIT = 0.1
SHORT = 512
RESAMPLES = 999
# Of a long text only so many last positions are compared: a profile takes time in proportion to their number.
LAST = 1024
MIDDLE = 2048
EVERYWHERE = range(FIRST, 2**62)


@dataclass(frozen=True, eq=False)
class KindErrors:
    """Sums over the positions of each text, by kind: what a substitute leaves, and what there was.

    Attributes
    ----------
    names
        The kinds measured; all but softmax.
    divergence, error
        Sums of the divergence and of |l - o|^2.
    uniform, energy
        Sums of the divergence of the mean of values and of |o|^2.
    positions
        Positions that were summed in each text.
    """

    names: tuple[str, ...]
    divergence: Float[np.ndarray, "kind text layer head"]
    error: Float[np.ndarray, "kind text layer head"]
    uniform: Float[np.ndarray, "text layer head"]
    energy: Float[np.ndarray, "text layer head"]
    positions: Int[np.ndarray, " text"]

    @property
    def texts(self) -> int:
        """Texts that were read."""
        return len(self.positions)

    def left(
        self, weights: Float[np.ndarray, "*draw text"] | None = None
    ) -> tuple[Float[np.ndarray, "*draw kind layer head"], Float[np.ndarray, "*draw kind layer head"]]:
        """The shares of gap and energy that each kind leaves, with texts weighted; NaN where there is no gap."""
        weight = np.ones(self.texts) if weights is None else weights

        def summed(values: np.ndarray) -> np.ndarray:
            return np.tensordot(weight, np.moveaxis(values, -3, 0), axes=1)

        count = (weight @ self.positions)[..., None, None]
        uniform, energy = summed(self.uniform), summed(self.energy)
        with np.errstate(divide="ignore", invalid="ignore"):
            gap = np.where(uniform / count >= NO_GAP, uniform, np.nan)
            kinds = weight.ndim - 1
            gap_left = summed(self.divergence) / np.expand_dims(gap, kinds)
            energy_left = summed(self.error) / np.expand_dims(energy, kinds)
        return gap_left, energy_left

    def labels(
        self, weights: Float[np.ndarray, "*draw text"] | None = None, *, limit: float = LIMIT
    ) -> Int[np.ndarray, "*draw layer head"]:
        """For each head the number in ``names`` of the first kind that suffices; their count where none does."""
        gap_left, energy_left = self.left(weights)
        suffices = (energy_left <= limit) & ~(gap_left > limit)
        axis = suffices.ndim - 3
        return np.where(suffices.any(axis=axis), suffices.argmax(axis=axis), len(self.names))

    def __getitem__(self, texts: slice) -> KindErrors:
        parts = (self.divergence[:, texts], self.error[:, texts], self.uniform[texts], self.energy[texts])
        return KindErrors(self.names, *parts, self.positions[texts])


def measure_kinds(
    model: Model,
    sequences: Sequence[Sequence[int]],
    mechanisms: Mapping[str, Mechanism],
    *,
    positions: Sequence[range] = (EVERYWHERE,),
    report: Callable[[int], None] = lambda done: None,
) -> list[KindErrors]:
    """Read token sequences and sum what each kind of substitute leaves, over each range of positions.

    Parameters
    ----------
    sequences
        Token ids; those that do not reach the positions are left out.
    mechanisms
        A mechanism with its parameters ``[layer, head, ...]`` for each kind, in the order of their cost.
    positions
        Ranges of positions of the queries to compare.
    report
        Called with the number of sequences read.
    """
    first = min(part.start for part in positions)
    long_enough = [ids for ids in sequences if len(ids) > max(part.start for part in positions)]
    if not long_enough:
        raise ValueInputError(f"texts must be longer than {first} tokens, got none; give longer ones")
    equipped = [*mechanisms.values(), resolve(BASELINE)]
    columns = []
    for number, ids in enumerate(long_enough):
        sums = visit_layers(model, ids, lambda layer: _layer_sums(layer, equipped, first, positions))
        columns.append(np.stack(sums, axis=3))
        report(number + 1)
    ranges = np.stack(columns, axis=3)  # range, quantity, mechanism, text, layer, head
    lengths = np.array([len(ids) for ids in long_enough])
    return [
        KindErrors(
            tuple(mechanisms),
            divergence[:-1],
            error[:-1],
            divergence[-1],
            energy[-1],
            np.minimum(lengths, part.stop) - part.start,
        )
        for part, (divergence, error, energy) in zip(positions, ranges, strict=True)
    ]


def _layer_sums(
    layer: LayerTensors, mechanisms: Sequence[Mechanism], first: int, positions: Sequence[range]
) -> Float[np.ndarray, "range quantity mechanism head"]:
    """Sums over ranges of queries, all behind ``first``: of divergence, of |l - o|^2 and of |o|^2."""
    q, o = layer.query[None, :, first:], layer.output[:, first:]
    k, v = layer.key[None], layer.value[None]
    visible = layer.visible.last_queries(q.shape[2])
    energy = o.double().square().sum(dim=-1)
    rows = []
    for mechanism in mechanisms:
        output = attend(
            mechanism.for_layers([layer.layer]),
            q,
            k,
            v,
            visible=visible,
            scale=layer.scale,
            check=False,
            rule=layer.rule,
        ).output[0]
        divergence = compare_outputs(o, output).divergence.double()
        error = (output - o).double().square().sum(dim=-1)
        values = torch.stack([divergence, error, energy])
        parts = [values[..., part.start - first : part.stop - first].sum(dim=-1) for part in positions]
        rows.append(torch.stack(parts).cpu().numpy())
    return np.stack(rows, axis=2)


@dataclass(frozen=True)
class Sufficiency:
    """Which kind suffices for each head.

    Attributes
    ----------
    labels
        The kind of each head, ``[layer][head]``.
    counts
        Heads of each kind, with the middle 95 % over resampled texts.
    keys_worth
        What each kind keeps per KV head, in keys with their values; None where that grows with the text.
    gap_closed
        The share of the gap that each kind closes over all heads.
    gap_left, energy_left
        By kind, the shares that it leaves in each head, ``[layer][head]``; None where there is no gap.
    stability
        By condition, the share of heads whose kind is the same there: in two halves of the texts against each other,
        and at other lengths against all texts. Empty where it was not measured.
    limit
        The share that a kind may leave.
    texts, tokens
        How much text that was.
    quick
        Whether the substitutes were fitted in a hurry, which the sentence then says.
    """

    labels: tuple[tuple[str, ...], ...]
    counts: Mapping[str, Interval]
    keys_worth: Mapping[str, float | None]
    gap_closed: Mapping[str, Interval]
    gap_left: Mapping[str, tuple[tuple[float | None, ...], ...]]
    energy_left: Mapping[str, tuple[tuple[float | None, ...], ...]]
    stability: Mapping[str, float]
    limit: float
    texts: int
    tokens: int
    quick: bool = False

    @property
    def heads(self) -> int:
        """Heads that have a kind."""
        return sum(map(len, self.labels))

    @property
    def sentence(self) -> str:
        """How many heads need what."""
        sentence = kinds_sentence(self.counts, self.keys_worth.get("window"))
        return f"{sentence} {QUICK_CALIBRATION}" if self.quick else sentence

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "labels": [list(row) for row in self.labels],
            "counts": {kind: count.to_json() for kind, count in self.counts.items()},
            "keys_worth": dict(self.keys_worth),
            "gap_closed": {kind: share.to_json() for kind, share in self.gap_closed.items()},
            "gap_left": {kind: [list(row) for row in rows] for kind, rows in self.gap_left.items()},
            "energy_left": {kind: [list(row) for row in rows] for kind, rows in self.energy_left.items()},
            "stability": dict(self.stability),
            "limit": self.limit,
            "texts": self.texts,
            "tokens": self.tokens,
            **({"quick": True} if self.quick else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sufficiency:
        """From plain data."""

        def rows(values: Any) -> tuple[tuple[float | None, ...], ...]:
            return tuple(tuple(None if x is None else float(x) for x in row) for row in values)

        return cls(
            labels=tuple(tuple(str(kind) for kind in row) for row in data["labels"]),
            counts={kind: Interval(**count) for kind, count in data["counts"].items()},
            keys_worth={kind: None if x is None else float(x) for kind, x in data["keys_worth"].items()},
            gap_closed={kind: Interval(**share) for kind, share in data["gap_closed"].items()},
            gap_left={kind: rows(values) for kind, values in data["gap_left"].items()},
            energy_left={kind: rows(values) for kind, values in data["energy_left"].items()},
            stability={name: float(share) for name, share in data["stability"].items()},
            limit=float(data["limit"]),
            texts=int(data["texts"]),
            tokens=int(data["tokens"]),
            quick=bool(data.get("quick", False)),
        )


def check_limit(limit: float) -> None:
    """Refuse what is no share."""
    if not 0 < limit < 1:
        raise ValueInputError(f"limit must be above 0 and below 1, got {limit:g}; 0.1 is usual")


def label_heads(
    model: Model,
    sequences: Sequence[Sequence[int]],
    mechanisms: Mapping[str, Mechanism],
    *,
    far: Sequence[Sequence[int]] = (),
    limit: float = LIMIT,
    stability: bool = True,
    seed: int = 0,
    report: Callable[[float], None] = lambda share: None,
) -> Sufficiency:
    """For each head the cheapest kind that suffices on these texts.

    Parameters
    ----------
    sequences
        Token ids of texts that nothing was fitted on.
    mechanisms
        A mechanism for each kind of ``softgap.kinds.KINDS`` but softmax, in that order; some may be left out.
    far
        Long texts. The labels at their last 1,024 positions, and at the last 1,024 of their first 2,048, are compared
        with those of all sequences.
    limit
        The share of gap and energy that a kind may leave.
    stability
        Whether to label the heads again on halves of the texts and at other lengths.
    seed
        Random seed of the bootstrap.
    report
        Called with the share of the work that is done.
    """
    check_limit(limit)
    distances = [ids[:length] for ids in far for length in far_lengths(len(ids))] if stability else []
    total = len(sequences) + len(distances)
    ranges = (EVERYWHERE, range(FIRST, SHORT)) if stability else (EVERYWHERE,)
    errors, *short = measure_kinds(model, sequences, mechanisms, positions=ranges, report=lambda n: report(n / total))
    labels = errors.labels(limit=limit)
    draws = np.random.default_rng(seed).multinomial(errors.texts, np.full(errors.texts, 1 / errors.texts), RESAMPLES)
    agreement = _halves(errors, limit) if stability else {}
    if short and max(map(len, sequences)) > SHORT:
        agreement[f"{SHORT} tokens"] = _agreement(short[0].labels(limit=limit), labels)
    for done, ids in enumerate(distances, start=len(sequences)):
        report(done / total)
        (distant,) = measure_kinds(model, [ids], mechanisms, positions=[range(len(ids) - LAST, len(ids))])
        agreement[f"{len(ids):,} tokens"] = _agreement(distant.labels(limit=limit), labels)
    report(1.0)
    names = (*errors.names, "softmax")
    resampled = errors.labels(draws.astype(float), limit=limit)
    counts = {
        name: _interval(float((labels == i).sum()), (resampled == i).sum(axis=(-2, -1))) for i, name in enumerate(names)
    }
    gap_left, energy_left = errors.left()
    dim = head_dim(model)
    return Sufficiency(
        labels=tuple(tuple(names[i] for i in row) for row in labels),
        counts=counts,
        keys_worth={name: _worth(mechanism, dim) for name, mechanism in mechanisms.items()},
        gap_closed={name: _closed(errors, i, draws) for i, name in enumerate(errors.names)},
        gap_left={name: _finite_rows(gap_left[i]) for i, name in enumerate(errors.names)},
        energy_left={name: _finite_rows(energy_left[i]) for i, name in enumerate(errors.names)},
        stability=agreement,
        limit=limit,
        texts=errors.texts,
        tokens=sum(map(len, sequences)),
    )


def far_lengths(tokens: int) -> list[int]:
    """Lengths at whose last 1,024 positions a long text is labelled; none for a shorter one."""
    return [length for length in sorted({min(MIDDLE, tokens), tokens}) if length > LAST]


def _halves(errors: KindErrors, limit: float) -> dict[str, float]:
    half = errors.texts // 2
    if half == 0:
        return {}
    first, second = (errors[part].labels(limit=limit) for part in (slice(0, half), slice(half, None)))
    return {"two halves of the text": _agreement(first, second)}


def _agreement(labels: np.ndarray, others: np.ndarray) -> float:
    return float((labels == others).mean())


def _interval(value: float, draws: np.ndarray) -> Interval:
    low, high = np.quantile(draws, [0.025, 0.975])
    return Interval(value, float(low), float(high))


def _closed(errors: KindErrors, kind: int, draws: np.ndarray) -> Interval:
    """The share of the gap over all heads that a kind closes."""
    left, gap = (values.sum(axis=(-2, -1)) for values in (errors.divergence[kind], errors.uniform))
    return _interval(float(1 - left.sum() / gap.sum()), 1 - (draws @ left) / (draws @ gap))


def _worth(mechanism: Mechanism, dim: int) -> float | None:
    worth = keys_worth(mechanism, dim)
    return worth if np.isfinite(worth) else None


def _finite_rows(values: Float[np.ndarray, "layer head"]) -> tuple[tuple[float | None, ...], ...]:
    return tuple(tuple(float(x) if np.isfinite(x) else None for x in row) for row in values)
