"""The focus lab inside a real model: every head over a text, beside what theory predicts for it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softgap.attention import Mechanism, resolve
from softgap.attention.rank import ENERGIES, capacity_exponent
from softgap.deprecation import DeprecatedAttribute
from softgap.errors import ValueInputError
from softgap.intervals import ClusterInterval, rank_correlation
from softgap.models.support import check_measurable
from softgap.models.tensor_files import calibrated_mechanisms
from softgap.probe.capture import check_lengths
from softgap.probe.layout import LayerTensors, visit_layers
from softgap.probe.recording import prepare_mechanism
from softgap.progress import Progress, silent
from softgap.theory.focus import model_claims
from softgap.theory.focus.closed_forms import GaussianTable, sparsity
from softgap.theory.focus.concentration import Effect, FamilyPoint, with_weights
from softgap.theory.focus.layer import FocusPlan, LayerFocus, examine_layer, pool_effects, pool_feature_families
from softgap.theory.lab import Claim
from softgap.trajectories.run import Displayed
from softgap.trajectories.validation import BASELINE

__all__ = ["Capacity", "MechanismFocus", "ModelFocus", "Prediction", "PredictionFailure", "focus_in_model"]

Reals = NDArray[np.float64]
_SHORTEST = 64
# Needed by verdicts.
_ALWAYS = ("elu1", "relu2_scores", BASELINE)
ERROR = 0.1


# What is measured of a mechanism in every head.
_CAPACITY = (
    *("ranks", "exponent", "needed"),
    *("ranks_with_sink", "exponent_with_sink", "needed_with_sink"),
)
_PER_HEAD = ("sparsity", "general", "iid", "from_softmax", "from_uniform", "columns", "distance", "block_error")


@dataclass(frozen=True, eq=False)
class Prediction:
    """One rung of the theory for softmax, beside what was measured.

    Attributes
    ----------
    values
        ``[layer, head, query]``.
    measured
        What they predict, in the same shape.
    ratio
        Median over heads and queries of predicted / measured.
    error
        Median of |log predicted - log measured|; 0.1 is a tenth.
    correlation
        Spearman's, across heads of the means over queries.
    """

    name: str
    values: Reals
    measured: Reals
    ratio: float
    error: float
    correlation: ClusterInterval


@dataclass(frozen=True, eq=False)
class MechanismFocus:
    """One mechanism over all heads; arrays are ``[layer, head]``, as in ``MechanismLayer``.

    Attributes
    ----------
    features
        Dimension of its feature map, None where it has none.
    floor
        Least error over the off-diagonal blocks of any attention with so many features; NaN without a feature map.
    """

    name: str
    features: int | None
    sparsity: Reals
    general: Reals
    iid: Reals
    gap: float
    from_softmax: Reals
    from_uniform: Reals
    columns: Reals
    distance: Reals
    block_error: Reals
    floor: Reals

    def summary(self) -> dict[str, Any]:
        """Means over heads."""
        means = (*_PER_HEAD, "floor")
        return {
            "mechanism": self.name,
            "features": self.features,
            "formula_gap": self.gap,
            **{name: _mean(getattr(self, name)) for name in means},
        }


@dataclass(frozen=True, eq=False)
class Capacity:
    """Ranks of the off-diagonal blocks of softmax, without the column of the first key, and with it.

    That column holds most of a sink head's energy and needs one rank: with it, a rank by energy describes the sink.

    Attributes
    ----------
    energies
        Shares of the energy that a rank holds.
    ranks
        ``[energy, size, layer, head]``: smallest rank that holds the share of the energy of the blocks of a size.
    exponent
        ``[energy, layer, head]``: slope of log rank in log size.
    needed
        ``[layer, head]``: smallest number of features of any linear map with a weight error of at most ``ERROR``.
    ranks_with_sink, exponent_with_sink, needed_with_sink
        The same with the column of the first key.
    """

    sizes: tuple[int, ...]
    energies: tuple[float, ...]
    ranks: Reals
    exponent: Reals
    needed: NDArray[np.int64]
    ranks_with_sink: Reals
    exponent_with_sink: Reals
    needed_with_sink: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PredictionFailure:
    """Where and why the Gaussian theory with a head's own covariance and number of keys fails.

    Attributes
    ----------
    error, error_without
        Median |log predicted - log measured| per head, ``[layer, head]``; ``without`` leaves the first key out.
    first_key
        How many standard deviations the score of the first key lies above the mean, mean over queries.
    skewness
        Of the other scores, mean over queries.
    with_first, with_skewness
        Spearman's correlation across heads: of ``error`` with |first_key|, of ``error_without`` with |skewness|.
    """

    error: Reals
    error_without: Reals
    first_key: Reals
    skewness: Reals
    with_first: ClusterInterval
    with_skewness: ClusterInterval


@dataclass(frozen=True, eq=False, repr=False)
class ModelFocus(Displayed):
    """What the focus lab found in a model; ``focus_without`` is S of softmax with the first key left out, per head."""

    claims: tuple[Claim, ...]
    predictions: tuple[Prediction, ...]
    failure: PredictionFailure
    focus_without: Reals
    mechanisms: tuple[MechanismFocus, ...]
    capacity: Capacity
    ranks: Mapping[tuple[str, str], NDArray[np.int64]]
    effects: tuple[Effect, ...]
    feature_families: tuple[FamilyPoint, ...]
    settings: Mapping[str, Any]
    road = DeprecatedAttribute("feature_families")

    def of(self, name: str) -> MechanismFocus:
        """One mechanism."""
        return next(mechanism for mechanism in self.mechanisms if mechanism.name == name)

    def to_json(self) -> dict[str, Any]:
        """Plain values: per head, and by position in bins; the rows of every query stay in ``predictions``."""
        return {
            "lab": "focus",
            "settings": dict(self.settings),
            "claims": [claim.to_json() for claim in self.claims],
            "predictions": [_prediction_json(rung) for rung in self.predictions],
            "failure": {
                name: value.tolist() if isinstance(value, np.ndarray) else asdict(value)
                for name, value in vars(self.failure).items()
            },
            "mechanisms": [mechanism.summary() for mechanism in self.mechanisms],
            "capacity": {
                "sizes": list(self.capacity.sizes),
                "energies": list(self.capacity.energies),
                **{name: getattr(self.capacity, name).tolist() for name in _CAPACITY},
            },
            "ranks": [
                {"mechanism": name, "of": mask, "ranks": ranks.tolist()} for (name, mask), ranks in self.ranks.items()
            ],
            "effects": [asdict(effect) for effect in self.effects],
            "road": [asdict(point) for point in self.feature_families],
        }


def focus_in_model(
    model: Any,
    token_ids: Sequence[int],
    *,
    rng: np.random.Generator,
    mechanisms: Sequence[str | Mechanism] | None = None,
    progress: Progress = silent,
) -> ModelFocus:
    """Measure S, entropy and largest weight of every head and query, and compare them with the theory.

    Parameters
    ----------
    token_ids
        The text, at least 64 tokens and no more than the model's context.
    rng
        Of the simulated Gaussian table and of the intervals.
    mechanisms
        Compared with softmax, beside elu1, relu2_scores and uniform; by default every one that has weights and waits
        for no parameters, and ``fitted`` where the model has a calibration.
    progress
        Called with a stage and the share of the whole that is done.
    """
    check_measurable(model)
    prepare = partial(prepare_mechanism, model=model)
    selection = with_weights(mechanisms, _ALWAYS, prepare=prepare)
    if mechanisms is None:
        selection += tuple(map(prepare, calibrated_mechanisms(model)))
    rivals = tuple(mechanism for mechanism in selection if mechanism.name != "softmax")
    if len(token_ids) < _SHORTEST:
        raise ValueInputError(
            f"a text must have at least {_SHORTEST} tokens for this lab, got {len(token_ids)}; give a longer one"
        )
    check_lengths(model, [list(token_ids)], 0)
    plan = FocusPlan(rivals, first=min(64, len(token_ids) // 4))
    total = getattr(model.config.get_text_config(), "num_hidden_layers", 1)

    def visit(layer: LayerTensors) -> LayerFocus:
        measures = examine_layer(layer, plan)
        progress(f"layer {layer.layer}", 0.9 * min(1.0, (layer.layer + 1) / total))
        return measures

    layers = visit_layers(model, token_ids, visit)
    progress("predicting", 0.92)
    predictions = _predictions(layers, plan, rng)
    measured = tuple(_mechanism(mechanism, layers, _dim(model)) for mechanism in (resolve("softmax"), *rivals))
    capacity = _capacity(layers)
    ranks = {key: np.stack([layer.ranks[key] for layer in layers]) for key in layers[0].ranks}
    effects, family_points = tuple(pool_effects(layers)), tuple(pool_feature_families(layers))
    settings = {"tokens": len(token_ids), "from_position": plan.first, "corner": min(plan.corner, len(token_ids))}
    failure, without = _failure(layers, plan, predictions, rng), np.nanmean(predictions[3].measured, axis=-1)
    claims = model_claims.all_claims(
        predictions, failure, without, measured, capacity, ranks, effects, family_points, settings["corner"]
    )
    progress("done", 1.0)
    return ModelFocus(
        claims, predictions, failure, without, measured, capacity, ranks, effects, family_points, settings
    )


def _dim(model: Any) -> int:
    config = model.config.get_text_config()
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _predictions(layers: Sequence[LayerFocus], plan: FocusPlan, rng: np.random.Generator) -> tuple[Prediction, ...]:
    """The rungs, each dropping one assumption: equal spread in all directions, many keys, no special first key."""
    rows = {
        name: np.stack([getattr(layer.softmax, name) for layer in layers])[..., plan.first :]
        for name in (
            *("sparsity", "entropy", "largest", "gamma", "isotropic"),
            *("without_sparsity", "without_gamma"),
        )
    }
    n = layers[0].softmax.n[plan.first :]
    widest = max(float(np.nanmax(rows[name])) for name in ("gamma", "isotropic", "without_gamma"))
    table = GaussianTable.simulate(int(n.max()), widest=max(widest, 0.1), rng=rng)
    s, entropy, largest = table.predict(rows["gamma"], n)
    without = table.predict(rows["without_gamma"], np.maximum(n - 1, 1))[0]
    rungs = (
        ("isotropic keys, n to infinity", sparsity("exp", gamma=rows["isotropic"]), rows["sparsity"]),
        ("own covariance, n to infinity", sparsity("exp", gamma=rows["gamma"]), rows["sparsity"]),
        ("own covariance, own n", s, rows["sparsity"]),
        ("own n, first key left out", without, rows["without_sparsity"]),
        ("entropy, own n", entropy, rows["entropy"]),
        ("largest weight, own n", largest, rows["largest"]),
    )
    return tuple(_prediction(*rung, rng) for rung in rungs)


def _prediction(name: str, values: Reals, measured: Reals, rng: np.random.Generator) -> Prediction:
    tiny = 1e-300
    logs = np.log(np.maximum(values, tiny)) - np.log(np.maximum(measured, tiny))
    layer = np.repeat(np.arange(len(values)), values.shape[1])
    correlation = rank_correlation(
        np.nanmean(values, axis=-1).ravel(), np.nanmean(measured, axis=-1).ravel(), layer, rng=rng, replicates=299
    )
    ratio = float(np.exp(np.nanmedian(logs)))
    return Prediction(name, values, measured, ratio, float(np.nanmedian(np.abs(logs))), correlation)


def _failure(
    layers: Sequence[LayerFocus], plan: FocusPlan, predictions: Sequence[Prediction], rng: np.random.Generator
) -> PredictionFailure:
    whole, without = (np.nanmedian(np.abs(np.log(p.values) - np.log(p.measured)), axis=-1) for p in predictions[2:4])
    first, skewness = (
        np.nanmean(np.stack([getattr(layer.softmax, name) for layer in layers])[..., plan.first :], axis=-1)
        for name in ("first", "without_skewness")
    )
    layer = np.repeat(np.arange(len(layers)), whole.shape[1])

    def across(x: Reals, y: Reals) -> ClusterInterval:
        return rank_correlation(x.ravel(), np.abs(y).ravel(), layer, rng=rng, replicates=299)

    return PredictionFailure(whole, without, first, skewness, across(whole, first), across(without, skewness))


def _prediction_json(rung: Prediction) -> dict[str, Any]:
    length = rung.values.shape[-1]
    edges = [0, *(2**i for i in range(4, 20) if 2**i < length), length]
    bins = [slice(a, b) for a, b in itertools.pairwise(edges)]
    return {
        "name": rung.name,
        "ratio": rung.ratio,
        "error": rung.error,
        "correlation": asdict(rung.correlation),
        "heads": {
            "predicted": np.nanmean(rung.values, axis=-1).tolist(),
            "measured": np.nanmean(rung.measured, axis=-1).tolist(),
        },
        "positions": {
            "from": edges[:-1],
            "predicted": [_mean(rung.values[..., some]) for some in bins],
            "measured": [_mean(rung.measured[..., some]) for some in bins],
        },
    }


def _mechanism(mechanism: Mechanism, layers: Sequence[LayerFocus], d: int) -> MechanismFocus:
    by_layer = [layer.mechanisms[mechanism.label] for layer in layers]
    features = mechanism.feature_dim(d)
    # A decaying feature has one rank in every block too, and inline's centring adds one.
    rank = None if features is None else features + (mechanism.normaliser == "centred")
    none = np.full_like(by_layer[0].sparsity, np.nan)
    floor = np.stack([none if rank is None else layer.spectra.floor(rank) for layer in layers])
    arrays = {field: np.stack([getattr(focus, field) for focus in by_layer]) for field in _PER_HEAD}
    gaps = [focus.gap for focus in by_layer]
    gap = float(np.nanmax(gaps)) if np.isfinite(gaps).any() else float("nan")
    return MechanismFocus(mechanism.label, features, **arrays, gap=gap, floor=floor)


def _capacity(layers: Sequence[LayerFocus]) -> Capacity:
    sizes = tuple(sorted(set(layers[0].spectra.sizes)))
    columns = []
    for spectra in ([x.spectra_without for x in layers], [x.spectra for x in layers]):
        ranks = np.array([[[x.energy_rank(size, 1 - e) for x in spectra] for size in sizes] for e in ENERGIES])
        flat = ranks.reshape(len(ENERGIES), len(sizes), -1)
        unknown = np.full(flat.shape[-1], np.nan)
        slopes = [capacity_exponent(sizes, each) if len(sizes) > 1 else unknown for each in flat]
        exponent = np.stack(slopes).reshape(len(ENERGIES), *ranks.shape[2:])
        columns.append((ranks, exponent, np.stack([x.needed(ERROR) for x in spectra])))
    return Capacity(sizes, ENERGIES, *columns[0], *columns[1])


def _mean(x: Reals) -> float:
    return float(np.nanmean(x)) if np.isfinite(x).any() else float("nan")
