"""What some heads of one layer become: their mechanism with the parameters of these heads only, and its output."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Float, Int
from torch import Tensor

from softgap.attention import Mechanism, Visible, attend, attend_hybrid
from softgap.errors import ModelError, ShapeError
from softgap.linearize.substitute import Readout, Substitute
from softgap.probe.layout import AttentionLayer
from softgap.probe.tap import AttentionCall

__all__ = ["Part", "part_of"]


@dataclass(frozen=True, eq=False)
class Part:
    """The swapped heads of one layer, and their mechanism with the parameters of these heads only.

    ``kv_heads`` are the KV heads that they need: each once where all serve equally many swapped heads, else one for
    each swapped head.
    """

    layer: AttentionLayer
    heads: Int[Tensor, " swapped"]
    kv_heads: Int[Tensor, " kv_head"]
    mechanism: Mechanism
    window: int | None = None
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
            found = self.read_out(self._attended(q, k, v, visible, call.scale))
        return found.transpose(1, 2).to(call.output.dtype)

    def read_out(
        self, output: Float[Tensor, "batch swapped query value_dim"]
    ) -> Float[Tensor, "batch swapped query value_dim"]:
        """The output after the readout, where there is one."""
        if self.weight is None or self.bias is None:
            return output
        weight, bias = (x.to(output.device, output.dtype) for x in (self.weight, self.bias))
        return output @ weight.transpose(-1, -2) + bias[:, None]

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> Tensor:
        # One row over all keys costs less than the state they would make; and the chunked form writes over what a
        # gradient needs.
        explicit = q.shape[2] == 1 or _differentiated(q, k, v, *self.mechanism.parameters.values())
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        form = "quadratic" if explicit else "auto"
        if self.window is not None:
            return attend_hybrid(
                self.mechanism, q, k, v, window=self.window, visible=visible, scale=scale, form=form, dtype=dtype
            ).output
        return attend(self.mechanism, q, k, v, visible=visible, scale=scale, form=form, dtype=dtype, check=False).output


def _differentiated(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def part_of(layer: AttentionLayer, heads: Sequence[int], chosen: Substitute, n_layers: int) -> Part:
    """These heads of a layer, ready to be computed by a substitute."""
    size = layer.heads // layer.kv_heads
    owners = [head // size for head in heads]
    shared = sorted(set(owners))
    # attend() gives every KV head equally many query heads.
    if len({owners.count(owner) for owner in shared}) == 1:
        owners = shared
    queries, keys = torch.tensor(heads), torch.tensor(owners)
    own = _parameters(chosen.mechanism, layer, n_layers)
    parameters = {
        # As large as both where every query head has a KV head of its own; then the two choices are one.
        name: x if x.shape[1] == 1 else x.index_select(1, (queries if x.shape[1] == layer.heads else keys).to(x.device))
        for name, x in own.parameters.items()
    }
    mechanism = dataclasses.replace(own, parameters=MappingProxyType(parameters))
    weight, bias = _readout(chosen.readout, layer, queries, n_layers)
    return Part(layer, queries, keys, mechanism, chosen.window, weight, bias)


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
