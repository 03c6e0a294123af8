"""What swapped heads compute: one mechanism for all of them, or several for heads of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from jaxtyping import Float, Int
from torch import Tensor

from softgap.attention import Mechanism, ScoreRule, Visible, add_window, attend, resolve
from softgap.errors import ModelError, ShapeError, ValueInputError
from softgap.models.loading import Model
from softgap.models.tensor_files import digest_of, load_calibration
from softgap.probe.layout import AttentionLayer
from softgap.probe.recording import prepare_mechanism
from softgap.probe.tap import AttentionCall

__all__ = [
    "LARGEST_WINDOW",
    "Head",
    "Readout",
    "Substitute",
    "SwappedLayer",
    "check_substitute",
    "substitute",
    "swapped_layer",
]


Head = tuple[int, int]


LARGEST_WINDOW = 2**20


@dataclass(frozen=True, eq=False)
class Readout:
    """An affine map of every head's output, l -> weight l + bias: the output correction."""

    weight: Float[Tensor, "layer head value_dim value_dim"]
    bias: Float[Tensor, "layer head value_dim"]

    def __post_init__(self) -> None:
        if self.weight.dim() != 4 or tuple(self.bias.shape) != tuple(self.weight.shape[:3]):
            raise ShapeError(
                "a readout's weight must be [layer, head, value_dim, value_dim] and its bias the same without the last "
                f"axis, got {list(self.weight.shape)} and {list(self.bias.shape)}"
            )

    @classmethod
    def identity(cls, layers: int, heads: int, value_dim: int) -> Readout:
        """The one that changes nothing."""
        weight = torch.eye(value_dim).expand(layers, heads, value_dim, value_dim).clone()
        return cls(weight, torch.zeros(layers, heads, value_dim))

    def tensors(self) -> dict[str, Tensor]:
        """Its numbers by name."""
        return {"weight": self.weight, "bias": self.bias}


@dataclass(frozen=True, eq=False, init=False)
class Substitute:
    """What swapped heads compute.

    Attributes
    ----------
    mechanism
        With its parameters ``[layer, head, ...]``.
    readout
        A map of each head's output; None leaves it.

    Parameters
    ----------
    window
        Keep softmax on so many of the most recent keys: short for ``add_window(mechanism, w=window, sinks=0)``.
    """

    mechanism: Mechanism
    readout: Readout | None

    def __init__(self, mechanism: Mechanism, window: int | None = None, readout: Readout | None = None) -> None:
        hybrid = mechanism if window is None else add_window(mechanism, w=window, sinks=0)
        object.__setattr__(self, "mechanism", hybrid)
        object.__setattr__(self, "readout", readout)

    @property
    def window(self) -> int | None:
        """Recent keys that softmax sees; None where it sees none."""
        return int(self.mechanism.options["w"]) if self.mechanism.kind in ("window", "hybrid") else None

    @property
    def name(self) -> str:
        """The mechanism with its options and the output correction, in words."""
        options = ",".join(f"{key}={value:g}" for key, value in self.mechanism.options.items())
        return f"{self.mechanism.name}{':' + options if options else ''}{', repaired' if self.readout else ''}"

    def tensors(self) -> dict[str, Tensor]:
        """Its numbers by name: those of the mechanism, and those of the readout."""
        tensors = {f"mechanism.{name}": x for name, x in self.mechanism.parameters.items()}
        if self.readout is not None:
            tensors |= {f"readout.{name}": x for name, x in self.readout.tensors().items()}
        return tensors

    @property
    def digest(self) -> str:
        """A hash of its numbers; empty where it has none."""
        tensors = self.tensors()
        return digest_of(tensors) if tensors else ""


def check_substitute(mechanism: str | None, window: int | None) -> None:
    """Refuse a mechanism that is unknown or softmax itself, and a window that is none; no model is needed for it."""
    if window is not None and not 1 <= window <= LARGEST_WINDOW:
        raise ValueInputError(f"window must be from 1 to {LARGEST_WINDOW} keys, got {window}; leave it out for none")
    if mechanism is None:
        return
    if resolve(mechanism.partition("@")[0]).name == "softmax":
        raise ValueInputError("heads must become something else than softmax, got 'softmax'; choose elu1 or fitted")
    if "@" in mechanism:
        load_calibration(Path(mechanism.partition("@")[2]).expanduser())


def substitute(mechanism: str | Mechanism | Substitute, model: Model, *, window: int | None = None) -> Substitute:
    """A mechanism by name or object, ready for this model, with a window where one is given."""
    check_substitute(None, window)
    if isinstance(mechanism, Substitute):
        return mechanism if window is None else Substitute(mechanism.mechanism, window, mechanism.readout)
    return Substitute(prepare_mechanism(mechanism, model), window)


@dataclass(frozen=True, eq=False)
class SwappedLayer:
    """The swapped heads of one layer, and their mechanism with the parameters of these heads only.

    ``kv_heads`` are the KV heads that they need: each once where all serve equally many swapped heads, else one for
    each swapped head.
    """

    layer: AttentionLayer
    heads: Int[Tensor, " swapped"]
    kv_heads: Int[Tensor, " kv_head"]
    mechanism: Mechanism
    weight: Float[Tensor, "swapped value_dim value_dim"] | None = None
    bias: Float[Tensor, "swapped value_dim"] | None = None

    def output(self, call: AttentionCall, visible: Visible) -> Float[Tensor, "batch query swapped value_dim"]:
        """The mechanism's output on the tensors of one call."""
        if (call.query.shape[1], call.key.shape[1]) != (self.layer.heads, self.layer.kv_heads):
            raise ModelError(
                f"layer {self.layer.number} had {self.layer.heads} heads when the swap began and has "
                f"{call.query.shape[1]} now; do not change a model while its heads are swapped"
            )
        device = call.query.device
        heads, kv_heads = self.heads.to(device), self.kv_heads.to(device)
        q = call.query.index_select(1, heads)
        k, v = (x.index_select(1, kv_heads) for x in (call.key, call.value))
        if visible.mask is not None and visible.mask.shape[1] > 1:
            visible = dataclasses.replace(visible, mask=visible.mask.index_select(1, heads))
        with torch.autocast(device.type, enabled=False):
            output = self.read_out(self._attended(q, k, v, visible, call.scale, call.rule.for_heads(heads)))
        return output.transpose(1, 2).to(call.output.dtype)

    def read_out(
        self, output: Float[Tensor, "batch swapped query value_dim"]
    ) -> Float[Tensor, "batch swapped query value_dim"]:
        """The output after the readout, where there is one."""
        if self.weight is None or self.bias is None:
            return output
        weight, bias = (x.to(output.device, output.dtype) for x in (self.weight, self.bias))
        return output @ weight.transpose(-1, -2) + bias[:, None]

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float, rule: ScoreRule) -> Tensor:
        # One row over all keys costs less than the state they would make; and the chunked form writes over what a
        # gradient needs.
        explicit = q.shape[2] == 1 or _needs_gradient(q, k, v, *self.mechanism.parameters.values())
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        form = "quadratic" if explicit else "auto"
        return attend(
            self.mechanism, q, k, v, visible=visible, scale=scale, form=form, dtype=dtype, check=False, rule=rule
        ).output


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def swapped_layer(
    layer: AttentionLayer, heads: Sequence[int], head_substitute: Substitute, n_layers: int
) -> SwappedLayer:
    """These heads of a layer, ready to be computed by a substitute."""
    size = layer.heads // layer.kv_heads
    owners = [head // size for head in heads]
    shared = sorted(set(owners))
    # attend() gives every KV head equally many query heads.
    if len({owners.count(owner) for owner in shared}) == 1:
        owners = shared
    queries, keys = torch.tensor(heads), torch.tensor(owners)
    layer_parameters = _parameters(head_substitute.mechanism, layer, n_layers)
    parameters = {
        # As large as both where every query head has a KV head of its own; then the two choices are one.
        name: x if x.shape[1] == 1 else x.index_select(1, (queries if x.shape[1] == layer.heads else keys).to(x.device))
        for name, x in layer_parameters.parameters.items()
    }
    mechanism = dataclasses.replace(layer_parameters, parameters=MappingProxyType(parameters))
    weight, bias = _readout(head_substitute.readout, layer, queries, n_layers)
    return SwappedLayer(layer, queries, keys, mechanism, weight, bias)


def _readout(
    readout: Readout | None, layer: AttentionLayer, heads: Int[Tensor, " swapped"], n_layers: int
) -> tuple[Tensor | None, Tensor | None]:
    if readout is None:
        return None, None
    if readout.weight.shape[0] != n_layers or readout.weight.shape[1] < layer.heads:
        raise ShapeError(
            f"a readout for this model must be for {n_layers} layers and, in layer {layer.number}, {layer.heads} "
            f"heads, got {readout.weight.shape[0]} and {readout.weight.shape[1]}; use one made for this model"
        )
    return readout.weight[layer.index, heads], readout.bias[layer.index, heads]


def _parameters(mechanism: Mechanism, layer: AttentionLayer, n_layers: int) -> Mechanism:
    """The mechanism with the parameters of one layer."""
    for name, tensor in mechanism.parameters.items():
        by_layer, by_head = tensor.shape[:2]
        if by_layer not in (1, n_layers) or by_head not in (1, layer.heads, layer.kv_heads):
            raise ShapeError(
                f"parameter '{name}' of mechanism '{mechanism.name}' must be for {n_layers} layers and, in layer "
                f"{layer.number}, {layer.heads} heads or {layer.kv_heads} KV heads (or 1 for all), got "
                f"{by_layer} and {by_head}; use parameters made for this model"
            )
    return mechanism.for_layers([layer.index])
