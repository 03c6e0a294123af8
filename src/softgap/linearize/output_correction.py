"""Output correction: an affine map of each swapped head's output, fitted layer by layer.

A head's substitute gives l where the original model's head gave o on the same token. Going up the layers, with those
below swapped and corrected, each swapped head gets the ridge regression towards the identity

    (M, b) = argmin  sum_t |o_t - M l_t - b|^2 + lambda |M - I|^2,      lambda = ridge x mean diagonal of sum l l^T,

l taken from the activations seen then and o from the original model: the head is not only brought back to itself, it
also makes up, as far as a linear map of its output can, for what the layers below have changed. The model's weights
stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from softgap.attention import Mechanism
from softgap.deprecation import deprecated_keywords
from softgap.errors import ValueInputError
from softgap.intervene.layerwise import LayerwiseRun
from softgap.intervene.substitute import Head, Readout, Substitute, SwappedLayer, substitute, swapped_layer
from softgap.intervene.swap import heads_by_layer
from softgap.linearize.sequences import Sequences
from softgap.models.loading import Model
from softgap.models.support import check_measurable
from softgap.probe.layout import attention_layers
from softgap.probe.tap import AttentionCall
from softgap.probe.visibility import VisibleSets
from softgap.progress import Progress, silent

__all__ = ["RIDGE", "fit_output_correction", "ridge_map"]

RIDGE = 0.1


@deprecated_keywords(read="sequences")
def fit_output_correction(
    model: Model,
    sequences: Sequences,
    heads: Sequence[Head],
    mechanism: str | Mechanism | Substitute,
    *,
    ridge: float = RIDGE,
    progress: Progress = silent,
) -> Substitute:
    """The substitute with a readout fitted for these heads, all of them swapped together.

    Parameters
    ----------
    sequences
        Sequences to fit on; 8,000 tokens are enough for heads of 64 dimensions.
    ridge
        Pull towards the identity, in units of the mean square of the head's output.
    """
    check_measurable(model)
    if not ridge > 0:
        raise ValueInputError(f"ridge must be above 0, got {ridge:g}; 0.1 is usual")
    layers = attention_layers(model)
    by_layer = heads_by_layer(layers, heads)
    head_substitute = substitute(mechanism, model)
    bare = head_substitute.with_readout(None)
    original, swapped = LayerwiseRun(model, sequences.ids), LayerwiseRun(model, sequences.ids)
    readout: Readout | None = None
    corrected_layers: dict[int, SwappedLayer] = {}

    def corrected_output(call: AttentionCall) -> Tensor:
        part = corrected_layers.get(id(call.module))
        if part is None:
            return call.output
        return call.output.index_copy(2, part.heads.to(call.output.device), part.output(call, VisibleSets().of(call)))

    for number, (layer, layer_heads) in enumerate(by_layer):
        original.advance_to(layer)
        swapped.advance_to(layer, corrected_output)
        part = swapped_layer(layer, layer_heads, bare, len(layers))
        weight, bias = _fit_layer(original, swapped, part, len(sequences), ridge)
        if readout is None:
            readout = head_substitute.readout or Readout.identity(
                len(layers), max(x.heads for x in layers), bias.shape[-1]
            )
            readout = Readout(readout.weight.clone(), readout.bias.clone())
        readout.weight[layer.index, part.heads], readout.bias[layer.index, part.heads] = weight, bias
        corrected_layers[id(layer.module)] = swapped_layer(layer, layer_heads, bare.with_readout(readout), len(layers))
        progress("correcting outputs", (number + 1) / len(by_layer))
    return bare.with_readout(readout)


def _fit_layer(
    unswapped: LayerwiseRun, swapped: LayerwiseRun, part: SwappedLayer, texts: int, ridge: float
) -> tuple[Float[Tensor, "swapped value_dim value_dim"], Float[Tensor, "swapped value_dim"]]:
    """The maps of one layer's heads, over all texts."""

    def original(call: AttentionCall) -> Tensor:
        return call.output.index_select(2, part.heads.to(call.output.device))

    def substituted(call: AttentionCall) -> Tensor:
        return part.output(call, VisibleSets().of(call))

    products = []
    for text in range(texts):
        o = unswapped.observe(part.layer, text, original)[0].transpose(0, 1).double()
        l = swapped.observe(part.layer, text, substituted)[0].transpose(0, 1).double()  # noqa: E741
        x = torch.cat([l, torch.ones_like(l[..., :1])], dim=-1)
        products.append(x.transpose(-1, -2) @ torch.cat([x, o], dim=-1))
    total = torch.stack(products).sum(dim=0)
    rows = total.shape[1]
    return ridge_map(total[..., :rows], total[..., rows:], ridge)


def ridge_map(
    gram: Float[Tensor, "head rows rows"], cross: Float[Tensor, "head rows value_dim"], ridge: float
) -> tuple[Float[Tensor, "head value_dim value_dim"], Float[Tensor, "head value_dim"]]:
    """M and b from x^T x and x^T o, x being l with a one behind it; the pull towards the identity leaves b alone."""
    d = cross.shape[-1]
    pull = ridge * gram.diagonal(dim1=-2, dim2=-1)[..., :d].mean(dim=-1).clamp(min=1e-12)
    penalty = torch.diag(torch.tensor([1.0] * d + [0.0], dtype=gram.dtype, device=gram.device))
    identity = torch.eye(d + 1, d, dtype=gram.dtype, device=gram.device)
    penalties = pull[:, None, None] * penalty
    solved = torch.linalg.solve(gram + penalties, cross + penalties @ identity)
    return solved[:, :d].transpose(-1, -2).float().cpu(), solved[:, d].float().cpu()
