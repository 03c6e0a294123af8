"""The samples of a page: which are carried token by token, their packed arrays, and their means by label."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Float32, Float64
from scipy.stats import t as student

from softgap.analysis.headline import gap_shares, gap_steps
from softgap.errors import unknown_name
from softgap.trajectories import FOCUS, QUANTITIES, Study, Trajectories
from softgap.trajectories.run import pieces
from softgap.trajectories.validation import BASELINE

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "LEVEL",
    "Group",
    "Groups",
    "PackedArray",
    "Selection",
    "array_keys",
    "array_of",
    "head_means",
    "keys_of",
    "pack",
    "part_pieces",
    "pieces_of",
    "round_values",
    "sample_payload",
    "sample_row",
    "select_samples",
    "unpack",
]


VALUES = 4_000_000


"""Values that a page carries: 2 bytes each, at most 10.7 MB in base64 if deflating gains nothing."""


VALUE_CHARACTERS = 2.7


"""What a value takes in the page where deflating gains nothing."""


@dataclass(frozen=True)
class Selection:
    """What goes into a page.

    Attributes
    ----------
    samples
        Names of the samples whose text and trajectories are carried.
    keys
        ``quantity/mechanism`` or a focus quantity: what is carried for every step; the rest as means per head.
    """

    samples: frozenset[str]
    keys: tuple[str, ...]


def array_keys(run: Trajectories) -> tuple[str, ...]:
    """Every array of a run, the most wanted first."""
    return keys_of(run.mechanisms, run.focus)


def keys_of(mechanisms: Sequence[str], focus: Container[str] = ()) -> tuple[str, ...]:
    """Every array of runs with these mechanisms: divergences, focus, then the rest mechanism by mechanism."""
    divergence, *others = QUANTITIES
    return (
        *(f"{divergence}/{mechanism}" for mechanism in mechanisms),
        *(name for name in FOCUS if name in focus),
        *(f"{quantity}/{mechanism}" for mechanism in mechanisms for quantity in others),
    )


def select_samples(study: Study, first: Trajectories, names: Sequence[str], *, values: int = VALUES) -> Selection:
    """Fill a page: samples with their divergences (one of every label in turn, or those asked for), then other arrays.

    Samples asked for are carried however large they are, and the first one is if nothing was asked for.
    """
    for sample_id in names:
        if sample_id not in study.ids:
            raise unknown_name("sample", sample_id, study.ids)
    table = study.samples()
    steps = _lengths(table)
    keys, needed = array_keys(first), len(first.mechanisms)
    room = values // first.n_heads
    selected: list[str] = []
    used = 0
    for sample_id in names or _by_label_in_turn(table):
        if selected and not names and used + steps[sample_id] * needed > room:
            continue
        selected.append(sample_id)
        used += steps[sample_id] * needed
    total = sum(steps[sample_id] for sample_id in selected)
    fitting = max(needed, min(len(keys), room // max(1, total)))
    return Selection(frozenset(selected), keys[:fitting])


def _lengths(table: pd.DataFrame) -> dict[str, int]:
    """Steps of every sample, those of its prompt included."""
    prompts = [0 if steps is None else len(steps) for steps in table["prompt_positions"]]
    return {
        str(sample_id): len(steps) + prompt
        for sample_id, steps, prompt in zip(table["sample_id"], table["positions"], prompts, strict=True)
    }


def _by_label_in_turn(table: pd.DataFrame) -> list[str]:
    """Names of the samples, one of every label in turn."""
    turn = table.groupby("label", sort=False, dropna=False).cumcount()
    return [str(sample_id) for sample_id in table["sample_id"].iloc[turn.argsort(kind="stable")]]


CODES = 65535


"""Codes that stand for numbers; the one after them is NaN."""


@dataclass(frozen=True)
class PackedArray:
    """An array as text, with its shape."""

    rows: int
    columns: int
    text: str


def pack(values: Float[np.ndarray, "row column"]) -> PackedArray:
    """Quantise every row between its least and greatest number; what is not finite becomes NaN."""
    wide = np.asarray(values, np.float64)
    known = np.isfinite(wide)
    least = np.min(wide, axis=1, where=known, initial=np.inf)
    greatest = np.max(wide, axis=1, where=known, initial=-np.inf)
    empty = ~known.any(axis=1)
    low = np.where(empty, 0.0, least).astype("<f4")
    span = np.where(empty, 0.0, greatest) - low
    step = (span / (CODES - 1)).astype("<f4")
    exact = step.astype(np.float64)[:, None]
    place = np.where(known, wide, 0.0) - low.astype(np.float64)[:, None]
    codes = np.rint(np.divide(place, exact, out=np.zeros_like(wide), where=exact > 0)).clip(0, CODES - 1)
    stored = np.where(known, codes, CODES).astype("<u2")
    planes = stored.view(np.uint8).reshape(*stored.shape, 2)
    content = low.tobytes() + step.tobytes() + planes[..., 1].tobytes() + planes[..., 0].tobytes()
    text = base64.b64encode(zlib.compress(content, 9)).decode("ascii")
    return PackedArray(wide.shape[0], wide.shape[1], text)


def unpack(packed: PackedArray) -> Float64[np.ndarray, "row column"]:
    """What the page makes of it: the reference for its own decoder."""
    content = zlib.decompress(base64.b64decode(packed.text))
    rows, size = packed.rows, packed.rows * packed.columns
    low, step = np.frombuffer(content, "<f4", 2 * rows).astype(np.float64).reshape(2, rows, 1)
    high, lower = np.frombuffer(content, np.uint8, 2 * size, 8 * rows).reshape(2, rows, packed.columns)
    codes = high.astype(np.int64) * 256 + lower
    return np.asarray(np.where(codes == CODES, np.nan, low + step * codes))


_EXCERPT = 120


# Says where a packed array can be found in the page.
Store = Callable[[PackedArray], int]


def sample_row(run: Trajectories, means: Mapping[str, Float64[np.ndarray, " head"]]) -> dict[str, Any]:
    """The sample in a list."""
    return {
        "id": run.sample_id,
        "label": run.label,
        "promptTokens": run.n_prompt,
        "steps": run.n_steps,
        "excerpt": (run.prompt_text or run.completion_text)[:_EXCERPT],
        "divergence": [_overall(means[f"divergence/{mechanism}"]) for mechanism in run.mechanisms],
        "logprob": _overall(run.logprob),
        "entropy": _overall(run.entropy),
    }


def sample_payload(
    run: Trajectories, keys: Sequence[str], means: Mapping[str, Float64[np.ndarray, " head"]], store: Store
) -> dict[str, Any]:
    """The sample with everything that can be shown token by token; steps of the prompt come first."""
    parts = [part for part in (run.prompt, run) if part is not None]
    real = run.kv_group >= 0
    return {
        "promptSteps": 0 if run.prompt is None else run.prompt.n_steps,
        "pieces": pieces_of(run),
        "tokens": [token for part in parts for token in part.tokens],
        "positions": [int(position) for part in parts for position in part.positions],
        "logprob": round_values(np.concatenate([part.logprob for part in parts])),
        "entropy": round_values(np.concatenate([part.entropy for part in parts])),
        "arrays": {
            key: store(pack(np.concatenate([array_of(part, key)[real] for part in parts], axis=-1))) for key in keys
        },
        "means": {key: round_values(means[key]) for key in array_keys(run) if key not in keys},
    }


def head_means(run: Trajectories) -> dict[str, Float64[np.ndarray, " head"]]:
    """Mean over the completion's steps of every array of a run, per head, padding left out."""
    real = run.kv_group >= 0
    means = {}
    for key in array_keys(run):
        values = array_of(run, key)[real].astype(np.float64)
        known = np.count_nonzero(~np.isnan(values), axis=-1)
        means[key] = np.where(known > 0, np.nansum(values, axis=-1) / np.maximum(known, 1), np.nan)
    return means


def round_values(values: Float[np.ndarray, " value"]) -> list[float | None]:
    """Six significant digits, null for what is not finite: what a reader of a page can use, in few bytes."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in np.asarray(values, np.float64)]


def array_of(run: Trajectories, key: str) -> Float32[np.ndarray, "layer head step"]:
    """The array of a run that a key of ``softgap.report.samples.array_keys`` names."""
    quantity, _, mechanism = key.partition("/")
    values: np.ndarray = run.quantities[quantity][run.mechanisms.index(mechanism)] if mechanism else run.focus[quantity]
    return values


def _overall(values: Float[np.ndarray, " value"]) -> float | None:
    known = np.asarray(values, np.float64)[np.isfinite(values)]
    return float(f"{known.mean():.6g}") if len(known) else None


def pieces_of(run: Trajectories) -> dict[str, list[list[Any]]]:
    """Of both parts the text in order as [piece, first step, steps, in the text].

    The first step is -1 where no step predicted the piece. Tokens that the text does not show, such as those of a chat
    template, are pieces of their own, not in the text.
    """
    if run.prompt is None:
        prompt = [[run.prompt_text, -1, 0, True]] if run.prompt_text else []
        return {"prompt": prompt, "completion": part_pieces(run.completion_text, run.tokens, 0)}
    return {
        "prompt": part_pieces(run.prompt_text, run.prompt.tokens, 0),
        "completion": part_pieces(run.completion_text, run.tokens, run.prompt.n_steps),
    }


def part_pieces(text: str, tokens: Sequence[str], offset: int) -> list[list[Any]]:
    """The pieces of one part, whose first step is ``offset``; see ``pieces_of``."""
    entries = []
    following = 0
    for piece, indices in pieces(text, tokens):
        if indices:
            entries += _hidden_pieces(tokens, following, indices[0], offset)
            entries.append([piece, offset + indices[0], len(indices), True])
            following = indices[-1] + 1
        else:
            entries.append([piece, -1, 0, True])
    return entries + _hidden_pieces(tokens, following, len(tokens), offset)


def _hidden_pieces(tokens: Sequence[str], start: int, stop: int, offset: int) -> list[list[Any]]:
    return [[tokens[i], offset + i, 1, False] for i in range(start, stop) if tokens[i]]


LEVEL = 0.95


"""Of every interval."""


# With more labels than this a label is a name, not a group.
_MOST = 12


@dataclass
class _Sums:
    """Number, sum and sum of squares of what has been added, entry by entry; NaN does not count."""

    count: Float64[np.ndarray, ...]
    total: Float64[np.ndarray, ...]
    squares: Float64[np.ndarray, ...]

    @classmethod
    def like(cls, values: Float[np.ndarray, ...]) -> _Sums:
        return cls(*(np.zeros(values.shape) for _ in range(3)))

    def add(self, values: Float[np.ndarray, ...]) -> None:
        if values.shape[-1] > self.count.shape[-1]:
            more = [(0, 0)] * (values.ndim - 1) + [(0, values.shape[-1] - self.count.shape[-1])]
            self.count, self.total, self.squares = (np.pad(x, more) for x in (self.count, self.total, self.squares))
        part = (..., slice(0, values.shape[-1]))
        known = ~np.isnan(values)
        wide = np.where(known, values, 0.0).astype(np.float64)
        self.count[part] += known
        self.total[part] += wide
        self.squares[part] += wide**2

    def mean(self) -> Float64[np.ndarray, ...]:
        return np.where(self.count > 0, self.total / np.maximum(self.count, 1), np.nan)

    def half_width(self) -> Float64[np.ndarray, ...]:
        """Half of Student's interval of the mean; NaN with fewer than two samples."""
        n = np.maximum(self.count, 2)
        variance = np.maximum(0.0, self.squares - n * self.mean() ** 2) / (n - 1)
        width = student.ppf((1 + LEVEL) / 2, n - 1) * np.sqrt(variance / n)
        return np.where(self.count > 1, width, np.nan)


@dataclass(eq=False)
class Group:
    """One label's samples.

    Attributes
    ----------
    label
        None for all samples of the study together.
    samples
        How many.
    heads
        By ``quantity/mechanism`` (or the name of a focus quantity): sums over samples of the mean over the completion's
        steps, per head. Every sample counts once, however long it is.
    overall
        The same, averaged over the heads.
    steps
        By ``divergence/mechanism``: sums over samples of the divergence at each step, as the mean over all heads, then
        over each layer.
    gap
        By mechanism: the divergence of every head, summed over all steps that a share of the gap is taken over.
    gap_steps
        How many steps these are.
    """

    label: str | None
    samples: int = 0
    heads: dict[str, _Sums] = field(default_factory=dict)
    overall: dict[str, _Sums] = field(default_factory=dict)
    steps: dict[str, _Sums] = field(default_factory=dict)
    gap: dict[str, Float64[np.ndarray, " head"]] = field(default_factory=dict)
    gap_steps: int = 0

    def add(self, run: Trajectories, means: Mapping[str, Float[np.ndarray, " head"]]) -> None:
        """Count one sample."""
        self.samples += 1
        for key, values in means.items():
            self.heads.setdefault(key, _Sums.like(values)).add(values)
            whole = _mean(values)[None]
            self.overall.setdefault(key, _Sums.like(whole)).add(whole)
        for key, steps in step_means(run).items():
            self.steps.setdefault(key, _Sums.like(steps)).add(steps)
        steps_with_gap = gap_steps(run)
        self.gap_steps += int(np.count_nonzero(steps_with_gap))
        real = run.kv_group >= 0
        for name in run.mechanisms:
            total = np.nansum(run.select(name).divergence[real][:, steps_with_gap], axis=-1, dtype=np.float64)
            self.gap[name] = total + self.gap.get(name, np.zeros_like(total))

    def gap_left(self) -> dict[str, Float64[np.ndarray, " head"]]:
        """The share of each head's gap that a mechanism leaves, by ``gap/mechanism``; none without the control."""
        if BASELINE not in self.gap:
            return {}
        uniform = self.gap[BASELINE]
        return {
            f"gap/{name}": gap_shares(total, uniform, self.gap_steps)
            for name, total in self.gap.items()
            if name != BASELINE
        }


class Groups:
    """All samples together, and those of every label, filled one sample at a time."""

    def __init__(self) -> None:
        self._everyone = Group(None)
        self._by_label: dict[str, Group] = {}

    def add(self, run: Trajectories, means: Mapping[str, Float[np.ndarray, " head"]]) -> None:
        """Count one sample, with the means of its arrays; see ``Group``."""
        self._everyone.add(run, means)
        label = run.label
        if label is not None and (label in self._by_label or len(self._by_label) <= _MOST):
            self._by_label.setdefault(label, Group(label)).add(run, means)

    def result(self) -> list[Group]:
        """All samples first, then the labels in the order they came; none of these if they are too many."""
        return [self._everyone, *(self._by_label.values() if len(self._by_label) <= _MOST else ())]


def step_means(run: Trajectories) -> dict[str, Float64[np.ndarray, "layer step"]]:
    """Divergence from each mechanism at each step of the completion: mean over all heads, then over each layer."""
    means = {}
    for name in run.mechanisms:
        values = run.select(name).divergence.astype(np.float64)
        means[f"divergence/{name}"] = np.stack([_mean(values, (0, 1)), *(_mean(layer, 0) for layer in values)])
    return means


def _mean(values: Float[np.ndarray, ...], axis: int | tuple[int, ...] | None = None) -> Float64[np.ndarray, ...]:
    known = np.count_nonzero(~np.isnan(values), axis=axis)
    return np.asarray(np.where(known > 0, np.nansum(values, axis=axis) / np.maximum(known, 1), np.nan))
