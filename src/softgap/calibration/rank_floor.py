"""Compare mechanisms with softmax by output and by weights, and with the floor that their rank sets.

The floor is the least error that any linear attention with as many features could have over the off-diagonal blocks of
the softmax weights (docs/theory/focus.md, Rank). It bounds weights, not outputs. Beside them the capacity
exponent: how the rank that holds a share of the energy of such a block grows with its size, without the column of the
sink token first, and with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from softgap.attention import Mechanism, attention_weights, compare_outputs, resolve
from softgap.attention.rank import (
    ENERGIES,
    BlockSpectra,
    RankGrowth,
    block_error,
    block_spectra,
    rank_growth,
    without_sink,
)
from softgap.calibration.held_out import FIRST
from softgap.models.loading import Model
from softgap.probe.layout import LayerTensors, visit_layers
from softgap.trajectories.validation import BASELINE

__all__ = ["Ladders", "Rung", "ladders"]

FIXED = ("elu1", "relu", "exp_dim", "hedgehog", "focused", "dpfp", "favor")


@dataclass(frozen=True)
class Rung:
    """A mechanism, in means over heads.

    Attributes
    ----------
    features
        None where there is no feature map.
    divergence
        Of its output from that of softmax, over queries from position 64 on (from the middle of a shorter text).
    weight_error
        Relative Frobenius error of its weights over the off-diagonal blocks of softmax.
    floor
        The least such error with as many features; None without a feature map.
    """

    mechanism: str
    features: int | None
    divergence: float
    weight_error: float
    floor: float | None


@dataclass(frozen=True)
class Ladders:
    """The rungs from the largest divergence to the smallest, and how the rank of softmax grows.

    Attributes
    ----------
    sizes
        Of off-diagonal blocks.
    growth
        Of the rank that holds 90, 99 and 99.9 % of their energy: without the sink first, then with it.
    """

    rungs: tuple[Rung, ...]
    sizes: tuple[int, ...]
    growth: tuple[RankGrowth, ...]
    tokens: int

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ladders:
        """From plain data."""
        # Files of version 0.1 hold one growth, at 99 % and with the sink, in fields of their own.
        old = [{"energy": 0.99, "sink": True, "ranks": data.get("ranks"), "exponent": data.get("exponent")}]
        return cls(
            tuple(Rung(**rung) for rung in data["rungs"]),
            tuple(data["sizes"]),
            tuple(_growth(each) for each in data.get("growth", old)),
            data["tokens"],
        )


def _growth(data: Mapping[str, Any]) -> RankGrowth:
    exponent = data["exponent"]
    ends = None if exponent is None else (exponent[0], exponent[1], exponent[2])
    return RankGrowth(data["energy"], data["sink"], tuple(data["ranks"]), ends)


@dataclass(frozen=True, eq=False)
class _LayerErrors:
    """Per mechanism: features and, per head, divergence, weight error and floor; and the spectra of softmax."""

    features: tuple[int | None, ...]
    numbers: Float[np.ndarray, "mechanism quantity head"]
    spectra: BlockSpectra
    without: BlockSpectra


def ladders(
    model: Model,
    token_ids: Sequence[int],
    fitted: Mechanism,
    *,
    report: Callable[[int], None] = lambda layers: None,
) -> Ladders:
    """Measure every rung over one text; memory grows with the square of its length, one layer at a time."""
    mechanisms = [resolve(BASELINE), *map(resolve, FIXED), fitted]

    def visit(layer: LayerTensors) -> _LayerErrors:
        errors = _measure_layer(layer, mechanisms)
        report(layer.layer + 1)
        return errors

    layers = visit_layers(model, token_ids, visit)
    means = np.stack([layer.numbers for layer in layers]).mean(axis=(0, 3)).tolist()
    rungs = [
        Rung(each.name, features, divergence, error, None if features is None else floor)
        for each, features, (divergence, error, floor) in zip(mechanisms, layers[0].features, means, strict=True)
    ]
    without, whole = [layer.without for layer in layers], [layer.spectra for layer in layers]
    return Ladders(
        tuple(sorted(rungs, key=lambda rung: -rung.divergence)),
        tuple(sorted(set(whole[0].sizes))),
        (
            *(rank_growth(without, energy, sink=False) for energy in ENERGIES),
            *(rank_growth(whole, energy, sink=True) for energy in ENERGIES),
        ),
        len(token_ids),
    )


def _measure_layer(layer: LayerTensors, mechanisms: Sequence[Mechanism]) -> _LayerErrors:
    heads, length, d = layer.query.shape
    value = layer.value.repeat_interleave(heads // layer.value.shape[0], dim=0)

    def weights_of(mechanism: str | Mechanism) -> Float[Tensor, "head query key"]:
        q, k = layer.query[None], layer.key[None]
        return attention_weights(mechanism, q, k, visible=layer.visible, scale=layer.scale)[0]

    exact = weights_of("softmax")
    spectra, spectra_without_sink = block_spectra(exact), block_spectra(without_sink(exact))
    counted = slice(min(FIRST, length // 2), None)
    rows = []
    for mechanism in mechanisms:
        weights = weights_of(mechanism.for_layers([layer.layer]))
        divergence = compare_outputs(layer.output, weights @ value).divergence[:, counted].mean(dim=-1)
        features = mechanism.feature_dim(d)
        floor = np.full(heads, np.nan) if features is None else spectra.floor(features)
        rows.append((features, np.stack([divergence.double().cpu().numpy(), block_error(weights, exact), floor])))
    return _LayerErrors(
        tuple(features for features, _ in rows),
        np.stack([numbers for _, numbers in rows]),
        spectra,
        spectra_without_sink,
    )
