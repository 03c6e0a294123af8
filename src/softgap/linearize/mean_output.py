"""The control ``mean_ablation`` from passages at hand: each head's mean output over them."""

from __future__ import annotations

import torch
from torch import Tensor

from softgap.attention import Mechanism, resolve
from softgap.linearize.passages import Passages
from softgap.probe.models import Model
from softgap.probe.tensors import LayerTensors, visit_layers

__all__ = ["mean_outputs"]


def mean_outputs(model: Model, read: Passages) -> Mechanism:
    """``mean_ablation`` with the mean output of each head over these passages."""
    sums: list[Tensor] = []

    def visit(layer: LayerTensors) -> None:
        found = layer.output.sum(dim=1, dtype=torch.float64).cpu()
        if layer.layer == len(sums):
            sums.append(found)
        else:
            sums[layer.layer] += found

    for row in read.ids[:, :-1].tolist():
        visit_layers(model, row, visit)
    heads, dim = (max(x.shape[axis] for x in sums) for axis in (0, 1))
    # Layers may differ in their heads; the rows behind them are never used.
    padded = [torch.nn.functional.pad(x, (0, dim - x.shape[1], 0, heads - x.shape[0])) for x in sums]
    mean = torch.stack(padded) / (len(read) * (read.ids.shape[1] - 1))
    return resolve("mean_ablation").with_parameters(mean=mean)
