"""What a local residual and a short convolution add to a linear attention in the heads of a model.

The output of a linear mechanism is l_t, that of the model o_t. A residual gives

    l'_t = a l_t + sum_{i < w} c_i v_{t-i}        (short convolution on values; Han et al. 2024, arXiv:2412.06590)

or exact softmax on the last w keys with the mechanism on the rest (the hybrid of ``add_window``). A short convolution
on keys lets the mechanism see k_j + c R k_{j-1}, where R turns the key of the position before by one position. All
numbers a, c_i and c belong to one head and are fitted on the first half of each text; divergences are those of the
second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from softgap.attention import Mechanism, add_window, attend, resolve
from softgap.attention.outputs import divergence
from softgap.attention.rotary import Rotation
from softgap.errors import UnsupportedError
from softgap.probe.layout import LayerTensors
from softgap.theory.injectivity.confusion import common_weights, confusion_rate
from softgap.trajectories.validation import BASELINE

__all__ = ["ALONE", "KEYS", "VALUES", "WINDOW", "ResidualPlan", "measure_residuals"]


ALONE, VALUES, WINDOW, KEYS = "alone", "with a convolution on values", "with exact softmax on w keys", "keys"


# Weights of the key before, 0 being no convolution.
_KEY_WEIGHTS = (-0.5, -0.25, 0.25, 0.5, 1.0)


@dataclass(frozen=True, eq=False)
class ResidualPlan:
    """What is measured in every layer.

    Attributes
    ----------
    mechanisms
        The linear ones; ``uniform`` is measured with them.
    width
        w: keys or values of a residual, the query's own among them.
    queries, near
        Of ``confusion_rate``.
    rotations
        Of every layer; None where they are unknown: keys are then mixed as they are.
    """

    mechanisms: tuple[Mechanism, ...]
    width: int
    queries: int
    near: float
    rotations: tuple[Rotation, ...] | None


def measure_residuals(layer: LayerTensors, plan: ResidualPlan) -> dict[str, Float64[np.ndarray, " head"]]:
    """Of every head, by name of mechanism and residual: mean divergence of the second half, and rates of confusion.

    ``divergence/elu1/alone`` and so on; ``divergence/elu1/keys`` is with the convolution on keys that was best in the
    first half, which may be none. ``confusion/elu1`` is the rate.
    """
    half = layer.query.shape[1] // 2
    measured: dict[str, np.ndarray] = {}
    nothing = torch.zeros_like(layer.output)
    measured[f"divergence/none/{VALUES}"] = _late(layer, _with_values(layer, nothing, plan.width, half), half)
    window = resolve("window").configure(w=plan.width, sinks=0)
    measured[f"divergence/none/{WINDOW}"] = _late(layer, _output(layer, window, layer.key), half)
    for mechanism in (resolve(BASELINE), *plan.mechanisms):
        m = mechanism.for_layers([layer.layer])
        plain, name = _output(layer, m, layer.key), f"divergence/{mechanism.label}"
        measured[f"{name}/{ALONE}"] = _late(layer, plain, half)
        measured[f"{name}/{VALUES}"] = _late(layer, _with_values(layer, plain, plan.width, half), half)
        hybrid = _hybrid(m, plan.width)
        if hybrid is not None:
            measured[f"{name}/{WINDOW}"] = _late(layer, _output(layer, hybrid, layer.key), half)
        if not mechanism.query_free:
            rotation = None if plan.rotations is None else plan.rotations[layer.layer]
            measured[f"{name}/{KEYS}"] = _best_keys(layer, m, plain, rotation, half)
    for mechanism in (resolve("softmax"), *plan.mechanisms):
        if mechanism.kind != "constant" and not mechanism.query_free:
            measured[f"confusion/{mechanism.label}"] = _confusion(layer, mechanism, plan)
    return measured


def _output(layer: LayerTensors, mechanism: Mechanism, key: Tensor) -> Float[Tensor, "head query value_dim"]:
    q, k, v = layer.query[None], key[None], layer.value[None]
    return attend(mechanism, q, k, v, visible=layer.visible, scale=layer.scale, check=False, rule=layer.rule).output[0]


def _late(
    layer: LayerTensors, output: Float[Tensor, "head query value_dim"], half: int
) -> Float64[np.ndarray, " head"]:
    """Mean divergence over the second half."""
    return np.asarray(divergence(layer.output, output)[:, half:].double().mean(dim=1).numpy())


def _hybrid(mechanism: Mechanism, width: int) -> Mechanism | None:
    """The mechanism with exact softmax on the last keys; None where its weights may be negative."""
    try:
        return add_window(mechanism, w=width, sinks=0)
    except UnsupportedError:
        return None


def _with_values(
    layer: LayerTensors, output: Float[Tensor, "head query value_dim"], width: int, half: int
) -> Float[Tensor, "head query value_dim"]:
    """a l + sum c_i v_{t-i}, with a and c fitted by least squares to the model's output in the first half."""
    heads, time, _ = layer.query.shape
    values = layer.value.repeat_interleave(heads // len(layer.value), dim=0)
    late = [torch.nn.functional.pad(values, (0, 0, i, 0))[:, :time] for i in range(min(width, time))]
    columns = torch.stack([output, *late], dim=-1).double()
    early, target = columns[:, :half].flatten(1, 2), layer.output[:, :half].double().flatten(1)[..., None]
    gram = early.transpose(1, 2) @ early
    # A column that is zero, or a copy of another, takes nothing away from the fit of the rest.
    weights: Tensor = torch.linalg.pinv(gram, hermitian=True) @ (early.transpose(1, 2) @ target)
    fitted: Tensor = (columns @ weights[:, None])[..., 0]
    return fitted.to(output.dtype)


def _best_keys(
    layer: LayerTensors,
    mechanism: Mechanism,
    plain: Float[Tensor, "head query value_dim"],
    rotation: Rotation | None,
    half: int,
) -> Float64[np.ndarray, " head"]:
    """Mean divergence of the second half with the key convolution that is best in the first, for each KV group."""
    time = layer.key.shape[1]
    before = torch.nn.functional.pad(layer.key, (0, 0, 1, 0))[:, :time]
    if rotation is not None:
        before = rotation.turned(before, torch.ones(time, dtype=torch.long))
    outputs = [plain, *(_output(layer, mechanism, layer.key + c * before) for c in _KEY_WEIGHTS)]
    rows = torch.stack([divergence(layer.output, output).double() for output in outputs])
    groups = rows.unflatten(1, (len(layer.key), -1))
    best = groups[..., :half].mean(dim=(2, 3)).argmin(dim=0)
    late = groups[..., half:].mean(dim=-1)
    chosen = late.gather(0, best[None, :, None].expand(1, *late.shape[1:]))
    return np.asarray(chosen.flatten().numpy())


def _confusion(layer: LayerTensors, mechanism: Mechanism, plan: ResidualPlan) -> Float64[np.ndarray, " head"]:
    """The rate of each head over the keys of the first half, for queries of the second."""
    time = layer.query.shape[1]
    places: Sequence[int] = np.unique(np.linspace(time // 2, time - 1, plan.queries).astype(int)).tolist()
    queries = layer.query[:, torch.as_tensor(places)]
    weights = common_weights(mechanism.for_layers([layer.layer]), queries, layer.key[:, : time // 2], layer.scale)
    return confusion_rate(queries, weights, near=plan.near)
