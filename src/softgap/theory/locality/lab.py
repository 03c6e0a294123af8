"""The locality lab: planted heads and small models, and what the heads of a model have from the keys near a query."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int

from softgap.attention import Mechanism, mechanisms, resolve
from softgap.checkpoints import Checkpoints
from softgap.errors import UnsupportedError, ValueInputError
from softgap.inputs import as_items
from softgap.intervals import ClusterInterval, cluster_interval, ratio, weighted_mean
from softgap.models.fingerprint import model_fingerprint
from softgap.models.support import check_measurable
from softgap.models.tensor_files import calibrated_mechanisms
from softgap.probe.capture import check_lengths
from softgap.probe.layout import AttentionLayer, attention_layers, layer_rotations, visit_layers
from softgap.probe.recording import prepare_mechanism
from softgap.progress import Progress, silent
from softgap.theory.lab import Claim, equal_texts
from softgap.theory.locality.ablation import ASSIGNMENTS, Ablation, Assignment, train_ablation
from softgap.theory.locality.claims import claims_of_model, claims_of_synthetic
from softgap.theory.locality.dependence import MASKS, Dependence, Label, planted_heads
from softgap.theory.locality.masking import MaskedText
from softgap.theory.locality.masks import CONTROLS, KINDS, Mask, MaskKind
from softgap.theory.locality.residuals import ALONE, KEYS, VALUES, WINDOW, ResidualPlan, measure_residuals
from softgap.trajectories.run import Displayed
from softgap.trajectories.validation import BASELINE

__all__ = ["Locality", "ModelLocality", "Residual", "locality_in_model", "locality_lab", "measured_heads"]


# The default mechanisms: the classical one, sparse and normalised maps, a polynomial, and the injective one.
DEFAULT = ("elu1", "relu", "exp_dim", "hedgehog", "taylor2", "inline")


WIDTHS = (1, 4, 16, 64)


SINKS = 1


_GOLDEN = (math.sqrt(5) - 1) / 2


# Raised where a number that is stored in a checkpoint is measured in another way.
_FORMAT = {"lab": "locality", "format": 1}


@dataclass(frozen=True, eq=False, repr=False)
class Locality(Displayed):
    """What the lab found without a model.

    Attributes
    ----------
    planted
        Heads whose label is known.
    truth
        Their labels.
    trained
        The ablation on each task; empty where nothing was trained.
    """

    planted: Dependence
    truth: tuple[Label, ...]
    trained: tuple[Ablation, ...]
    settings: dict[str, Any]

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The verdicts, read from the fields above."""
        return claims_of_synthetic(self)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "lab": "locality",
            "settings": self.settings,
            "claims": [claim.to_json() for claim in self.claims],
            "truth": list(self.truth),
            "planted": self.planted.to_json(),
            "trained": [ablation.to_json() for ablation in self.trained],
        }


@dataclass(frozen=True, eq=False)
class Residual:
    """A linear mechanism with one kind of residual.

    Attributes
    ----------
    gap_closed
        1 - mean divergence over that of ``uniform``, over heads.
    of_rest
        Share of the divergence that the mechanism has alone and that the residual takes away; NaN for ``none``.
    over_uniform
        Its gap closed minus that of ``uniform`` with the same residual: what the mechanism itself adds.
    divergence
        Of the second half of each text.
    """

    mechanism: str
    kind: str
    gap_closed: ClusterInterval
    of_rest: ClusterInterval
    over_uniform: ClusterInterval
    divergence: Float64[np.ndarray, "text head"]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "mechanism": self.mechanism,
            "residual": self.kind,
            "gap_closed": asdict(self.gap_closed),
            "of_rest": asdict(self.of_rest),
            "over_uniform": asdict(self.over_uniform),
            "divergence": self.divergence.mean(axis=0).tolist(),
        }


@dataclass(frozen=True, eq=False, repr=False)
class ModelLocality(Displayed):
    """What the lab found in a model; heads are those of all layers, one layer behind the other.

    Attributes
    ----------
    widths
        Numbers of recent keys.
    share, even
        Share of the mass that is neither sink nor self on the last w keys, and w / (t - 1).
    share_interval
        Mean over heads of ``share`` minus ``even``, for each width.
    together
        The rise in loss and the removed mass with a mask in all heads at once, by kind of mask.
    dependence
        Some heads, one at a time; None where none was asked for.
    excess
        By kind of far mask: mean over those heads of the rise by the local mask minus that by the far one.
    residuals
        Every mechanism with every residual.
    confusion
        Rate of each mechanism in each head.
    confused
        Mean over heads of that rate minus that of softmax.
    """

    widths: tuple[int, ...]
    share: Float64[np.ndarray, "text width head"]
    even: Float64[np.ndarray, "text width head"]
    share_interval: tuple[ClusterInterval, ...]
    together: Mapping[str, Float64[np.ndarray, "text width 2"]]
    loss: Float64[np.ndarray, " text"]
    dependence: Dependence | None
    excess: Mapping[MaskKind, ClusterInterval]
    residuals: tuple[Residual, ...]
    confusion: Mapping[str, Float64[np.ndarray, "text head"]]
    confused: Mapping[str, ClusterInterval]
    settings: dict[str, Any]

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The verdicts, read from the fields above."""
        return claims_of_model(self)

    def residual(self, mechanism: str, kind: str) -> Residual | None:
        """One of them by name."""
        return next((r for r in self.residuals if (r.mechanism, r.kind) == (mechanism, kind)), None)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "lab": "locality",
            "settings": self.settings,
            "claims": [claim.to_json() for claim in self.claims],
            "widths": list(self.widths),
            "share": self.share.mean(axis=0).tolist(),
            "even": self.even.mean(axis=(0, 2)).tolist(),
            "share_above_even": [asdict(interval) for interval in self.share_interval],
            "loss": self.loss.tolist(),
            "all_heads_at_once": {
                kind: {"rise": values[..., 0].tolist(), "removed": values[..., 1].mean(axis=0).tolist()}
                for kind, values in self.together.items()
            },
            "one_head": None if self.dependence is None else self.dependence.to_json(),
            "excess": {kind: asdict(interval) for kind, interval in self.excess.items()},
            "residuals": [residual.to_json() for residual in self.residuals],
            "confusion": {name: rates.tolist() for name, rates in self.confusion.items()},
            "confused": {name: asdict(interval) for name, interval in self.confused.items()},
        }


def locality_lab(
    *,
    rng: np.random.Generator,
    heads: int = 12,
    length: int = 128,
    dim: int = 64,
    width: int = 4,
    texts: int = 8,
    train: bool = False,
    tasks: Sequence[str] | None = None,
    seeds: int = 3,
    steps: int | None = None,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Locality:
    """The lab on planted heads, and with ``train`` on small models.

    Parameters
    ----------
    rng
        The generator of queries, keys and values.
    heads
        Planted heads of each kind: local, heavy, neither.
    length, dim
        Positions, and dimension of a head.
    width
        w, the number of recent keys that are local.
    texts
        Independent draws of every head, the sample of the tests.
    train
        Whether small models are trained: minutes.
    tasks
        ``mixed`` and ``binding``, or one of them.
    seeds, steps
        Models per arm, and steps per model (None: those of the task).
    folder
        Where finished models are kept and found again; None keeps none.
    progress
        Called with the stage in words and the share of it that is done.

    Returns
    -------
    Locality
        A label for every head beside the true one, the scores of trained models, and a verdict for each claim.

    Examples
    --------
    >>> import numpy as np
    >>> from softgap.theory import locality_lab
    >>> lab = locality_lab(rng=np.random.default_rng(0), heads=2, length=64, dim=32, texts=4)
    >>> lab.truth
    ('local', 'local', 'heavy', 'heavy', 'neither', 'neither')
    >>> lab.planted.labels == lab.truth
    True
    """
    if heads < 1 or dim < 8 or texts < 2 or length < 16 * width or width < 1:
        raise ValueInputError(
            f"planted heads need heads from 1, dim from 8, texts from 2 and 16 tokens for each of the recent keys, got "
            f"{heads} heads of dimension {dim}, {texts} texts of {length} tokens and {width} recent keys; use more"
        )
    tell = progress or silent
    kinds: tuple[Label, ...] = ("local", "heavy", "neither")
    truth = tuple(kind for kind in kinds for _ in range(heads))
    tell("planting heads", 0.0)
    # Twice what w keys contribute to an even mean: keys that nobody asks for do not count.
    least = 2 * width / (length // 2 - width)
    planted = planted_heads(truth, rng=rng, texts=texts, length=length, dim=dim, width=width, least=least)
    trained = []
    for name in as_items(tasks or tuple(ASSIGNMENTS)) if train else ():
        base = ASSIGNMENTS.get(name) or Assignment(name)  # an unknown task is refused there
        assignment = Assignment(**{**asdict(base), **({} if steps is None else {"steps": steps})})
        store = Checkpoints(None if folder is None else folder / "cells", _FORMAT)
        trained.append(train_ablation(assignment=assignment, seeds=seeds, checkpoints=store, progress=tell))
    settings = {"heads": heads, "tokens": length, "dim": dim, "width": width, "texts": texts}
    settings |= {"trained_seeds": seeds} if train else {}
    return Locality(planted, truth, tuple(trained), settings)


def locality_in_model(
    model: Any,
    texts: Sequence[Sequence[int]] | Sequence[int],
    *,
    rng: np.random.Generator,
    mechanisms: Sequence[str | Mechanism] | None = None,
    widths: Sequence[int] | None = None,
    width: int = 4,
    heads: int | None = 30,
    queries: int = 64,
    near: float = 0.2,
    least: float = 1e-3,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> ModelLocality:
    """The lab in the heads of a model over some texts; the first half of each text is context, and fitted on.

    Parameters
    ----------
    texts
        The token ids of each text, all equally many; one list of ids is one text. Verdicts about heads need several.
    widths
        For attention mass and masks in all heads: 1, 4, 16 and 64 by default, as far as a quarter of a text holds them.
    width
        For single heads and residuals.
    heads
        How many heads to mask one at a time, spread evenly over the model; None for all, 0 for none.
    queries, near
        Of the rate of confusion, as in the injectivity lab.
    least
        Smallest rise in loss that counts, in nats per token.
    folder
        Where finished texts and layers are kept and found again; None keeps none.
    """
    check_measurable(model)
    read = equal_texts(texts)
    sizes = _check_sizes(len(read[0]), widths, width, heads)
    check_lengths(model, read, 0)
    layers = attention_layers(model)
    if len({(layer.heads, layer.kv_heads) for layer in layers}) != 1:
        raise UnsupportedError(
            "this lab needs the same number of heads in every layer, got layers that differ; use another model"
        )
    selection = _resolve_mechanisms(model, mechanisms)
    plan = ResidualPlan(tuple(selection), width, queries, near, layer_rotations(model))
    work = _ModelWork(model, read, layers, sizes, measured_heads(layers, heads), plan, int(rng.integers(2**31)), folder)
    measured = work.measure(progress or silent)
    settings = {
        **{"tokens": len(read[0]), "texts": len(read), "layers": len(layers), "heads": layers[0].heads},
        **{"width": width, "masked_heads": len(work.heads), "least": least, "sinks": SINKS, "near": near},
        **{"mechanisms": [m.label for m in selection], "keys_turned": plan.rotations is not None},
    }
    clusters = np.repeat(np.arange(len(layers) * layers[0].kv_heads), layers[0].heads // layers[0].kv_heads)
    return _assemble(measured, work, clusters, settings, least, rng)


def _check_sizes(length: int, widths: Sequence[int] | None, width: int, heads: int | None) -> tuple[int, ...]:
    """The widths that texts of this length are long enough for."""
    if heads is not None and heads < 0:
        raise ValueInputError(f"heads must be 0 or more, got {heads}; leave it out for all")
    sizes = tuple(w for w in WIDTHS if 4 * w <= length) if widths is None else tuple(sorted(set(widths)))
    every = (width, *sizes)
    if length < max(4 * max(every), 16) or min(every) < 1:
        raise ValueInputError(
            f"a text must have at least 16 tokens and 4 for each of the {max(every)} recent keys, and widths must be "
            f"at least 1, got {length} tokens and widths {', '.join(map(str, every))}; give a longer text"
        )
    return sizes


def _resolve_mechanisms(model: Any, names: Sequence[str | Mechanism] | None) -> list[Mechanism]:
    requests = [*DEFAULT, *calibrated_mechanisms(model)] if names is None else as_items(names)
    selection = [resolve(prepare_mechanism(name, model)) for name in requests]
    linear = [n for n, m in mechanisms().items() if m.kind == "features" and not m.query_free]
    for mechanism in selection:
        if mechanism.kind != "features" or mechanism.query_free:
            raise UnsupportedError(
                f"a local residual is added to linear attention, and mechanism '{mechanism.name}' is none; choose one "
                f"of: {', '.join(linear)}"
            )
    if not selection:
        raise ValueInputError("a locality lab needs at least one mechanism, got none; name one")
    return selection


def measured_heads(layers: Sequence[AttentionLayer], count: int | None) -> dict[int, list[int]]:
    """By index of their layer, so many heads spread evenly over the model."""
    every = [(layer.index, head) for layer in layers if not layer.shared for head in range(layer.heads)]
    number = len(every) if count is None else min(count, len(every))
    # One of each stretch, by the golden ratio: an even step could pick the same place in every layer.
    stretch = len(every) / number if number else 0.0
    places = sorted({int((i + i * _GOLDEN % 1) * stretch) for i in range(number)})
    by_layer: dict[int, list[int]] = {}
    for place in places:
        by_layer.setdefault(every[place][0], []).append(every[place][1])
    return by_layer


class _ModelWork:
    """The parts of the measurement of a model, each found again where it was finished before."""

    def __init__(
        self,
        model: Any,
        texts: Sequence[list[int]],
        layers: Sequence[AttentionLayer],
        widths: tuple[int, ...],
        by_layer: Mapping[int, list[int]],
        plan: ResidualPlan,
        seed: int,
        folder: Path | None,
    ) -> None:
        self._model, self._texts, self._layers, self.widths = model, texts, layers, widths
        self._by_layer, self._plan, self._seed = by_layer, plan, seed
        self.heads = tuple((layers[i].number, head) for i, heads in by_layer.items() for head in heads)
        self.masks = [Mask(kind, plan.width) for kind in MASKS]
        self.width = plan.width
        about = {
            **_FORMAT,
            "fingerprint": model_fingerprint(model),
            "sizes": [widths, plan.width, SINKS, seed],
        }
        # Masks do not depend on them: with other mechanisms, what is masked is found again.
        self._compared = [[m.label, str(m.origin)] for m in plan.mechanisms] + [plan.queries, plan.near]
        self._store = Checkpoints(None if folder is None else folder / "parts", about)

    def measure(self, tell: Progress) -> dict[str, np.ndarray]:
        """Everything, with texts as the first axis."""
        rows = []
        for number, ids in enumerate(self._texts):
            name, done, total = f"text {number + 1} of {len(self._texts)}", number, len(self._texts)
            digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:32]
            tell(f"{name}: mass and residuals", done / total)
            find = self._store.find_or_make
            residuals = find(["residuals", digest, self._compared], partial(self._residuals, ids))
            masked = _LazyText(self._model, ids, self.widths, self._seed)
            tell(f"{name}: all heads at once", (done + 0.2) / total)
            together = find(["together", digest], partial(self._together, masked))
            parts = []
            for place, (index, heads) in enumerate(self._by_layer.items()):
                tell(f"{name}: layer {index}", (done + 0.4 + 0.6 * place / len(self._by_layer)) / total)
                make = partial(self._one_layer, masked, index, heads)
                parts.append(find(["one head", digest, index, heads], make))
            joined = {key: np.concatenate([part[key] for part in parts], axis=1) for key in (parts[0] if parts else ())}
            rows.append({**residuals, **together, **joined})
        return {key: np.array([row[key] for row in rows], dtype=np.float64) for key in rows[0]}

    def _residuals(self, ids: Sequence[int]) -> dict[str, Any]:
        layers = visit_layers(self._model, ids, lambda layer: measure_residuals(layer, self._plan))
        return {key: np.concatenate([layer[key] for layer in layers]).tolist() for key in layers[0]}

    def _together(self, masked: _LazyText) -> dict[str, Any]:
        text = masked.text
        shares = np.concatenate([share.numpy() for share in text.shares], axis=-1)
        rises = {f"together/{kind}": [text.hide_from_all(Mask(kind, width)) for width in self.widths] for kind in KINDS}
        return {"loss": text.loss, "share": shares[0].tolist(), "even": shares[1].tolist(), **rises}

    def _one_layer(self, masked: _LazyText, index: int, heads: Sequence[int]) -> dict[str, Any]:
        rises = masked.text.hide_from_heads(self._layers[index], heads, self.masks)
        return {"rise": rises.rise.tolist(), "removed": rises.removed.tolist()}


class _LazyText:
    """A text that the model reads only where some part of it is not finished yet."""

    def __init__(self, model: Any, ids: Sequence[int], widths: Sequence[int], seed: int) -> None:
        self._read = partial(MaskedText, model, ids, start=len(ids) // 2, widths=widths, sinks=SINKS, seed=seed)
        self._text: MaskedText | None = None

    @property
    def text(self) -> MaskedText:
        """It, read once."""
        if self._text is None:
            self._text = self._read()
        return self._text


def _assemble(
    measured: Mapping[str, np.ndarray],
    work: _ModelWork,
    clusters: Int[np.ndarray, " head"],
    settings: dict[str, Any],
    least: float,
    rng: np.random.Generator,
) -> ModelLocality:
    def mean(values: Float64[np.ndarray, " head"], groups: np.ndarray = clusters) -> ClusterInterval:
        known = np.isfinite(values)
        return cluster_interval(values[known][None], groups[known], weighted_mean, rng=rng)

    share, even = measured["share"], measured["even"]
    dependence: Dependence | None = None
    excess: dict[MaskKind, ClusterInterval] = {}
    if work.heads:
        dependence = Dependence(work.heads, measured["rise"], measured["removed"], work.width, least)
        layers = np.array([layer for layer, _ in work.heads])
        excess = {kind: mean(dependence.excess(kind), layers) for kind in CONTROLS}
    confusion = {key.partition("/")[2]: rates for key, rates in measured.items() if key.startswith("confusion/")}
    with np.errstate(invalid="ignore"):
        rates = {name: rate.mean(axis=0) for name, rate in confusion.items()}
    return ModelLocality(
        widths=work.widths,
        share=share,
        even=even,
        share_interval=tuple(mean((share - even)[:, i].mean(axis=0)) for i in range(len(work.widths))),
        together={kind: measured[f"together/{kind}"] for kind in KINDS},
        loss=measured["loss"],
        dependence=dependence,
        excess=excess,
        residuals=_residuals(measured, clusters, rng),
        confusion=confusion,
        confused={name: mean(rate - rates["softmax"]) for name, rate in rates.items() if name != "softmax"},
        settings=settings,
    )


def _residuals(
    measured: Mapping[str, np.ndarray], clusters: Int[np.ndarray, " head"], rng: np.random.Generator
) -> tuple[Residual, ...]:
    uniform = measured[f"divergence/{BASELINE}/{ALONE}"].mean(axis=0)
    residuals = []
    for key, divergence in measured.items():
        what, _, name = key.partition("/")
        if what != "divergence":
            continue
        mechanism, _, kind = name.rpartition("/")
        baseline = ALONE if kind == KEYS else kind
        rival, own = measured[f"divergence/{BASELINE}/{baseline}"].mean(axis=0), divergence.mean(axis=0)
        alone = measured.get(f"divergence/{mechanism}/{ALONE}", np.full_like(divergence, np.nan)).mean(axis=0)
        closed, rest, over = (
            cluster_interval(np.stack([gain, whole]), clusters, ratio, rng=rng)
            for gain, whole in ((uniform - own, uniform), (alone - own, alone), (rival - own, uniform))
        )
        residuals.append(Residual(mechanism, kind, closed, rest, over, divergence))
    order = (ALONE, VALUES, WINDOW, KEYS)
    return tuple(sorted(residuals, key=lambda residual: order.index(residual.kind)))
