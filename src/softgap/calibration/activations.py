"""Collect the queries and keys of every layer on the calibration text, and the positional profile of each head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from softgap.attention.rotary import Rotation
from softgap.calibration.fit import LayerText
from softgap.errors import UnsupportedError
from softgap.models.loading import Model
from softgap.probe.layout import LayerTensors, visit_layers

__all__ = ["Activations", "LayerSample", "LayerSite", "gather"]


# Rows of each text that the means are taken over; every row of a long text would cost more than the model itself.
ROWS = 128


# Distances up to this one stand alone; beyond it they are averaged in bins that grow by a tenth.
EXACT = 64


GROWTH = 1.1


class ProfileSums:
    """Running sums of softmax weights by distance, over a sample of rows."""

    def __init__(self, heads: int, distances: int) -> None:
        self._weight = torch.zeros(heads, distances, dtype=torch.float64)
        self._pairs = torch.zeros(distances, dtype=torch.float64)
        self._first = torch.zeros(heads, dtype=torch.float64)
        self._rows = 0

    def add(
        self,
        q: Float[Tensor, "head time dim"],
        k: Float[Tensor, "kv_head time dim"],
        *,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
    ) -> None:
        """Take in evenly spaced rows of one text."""
        t = q.shape[1]
        rows = torch.linspace(0, t - 1, min(ROWS, t), device=q.device).round().long()
        group_queries = q[:, rows].unflatten(0, (k.shape[0], -1)).flatten(1, 2)
        scores = (group_queries @ k.transpose(-1, -2) * scale).reshape(q.shape[0], len(rows), t)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        distance = rows[:, None] - torch.arange(t, device=q.device)
        seen = (distance >= 0) & (distance < (t if window is None else window))
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1).cpu()
        seen, distance = seen.cpu(), distance.cpu()
        first = seen & (seen.cumsum(dim=-1) == 1)
        self._first += (weights * first).sum(dim=(1, 2), dtype=torch.float64)
        self._rows += len(rows)
        # The first key has a weight of its own; the last distance serves all beyond.
        later_keys = seen & ~first
        at = distance[later_keys].clamp(max=len(self._pairs) - 1)
        self._weight.index_add_(1, at, weights[:, later_keys].double())
        self._pairs.index_add_(0, at, torch.ones(len(at), dtype=torch.float64))

    def result(self) -> tuple[Float[Tensor, " head"], Float[Tensor, "head distance"]]:
        """The mean weight on the first token, and by distance, smooth where single distances have few rows."""
        by_distance = torch.zeros_like(self._weight)
        for start, stop in _bins(self._weight.shape[1]):
            pairs = self._pairs[start:stop].sum().clamp(min=1)
            by_distance[:, start:stop] = (self._weight[:, start:stop].sum(dim=1) / pairs)[:, None]
        return self._first / max(1, self._rows), by_distance


def _bins(distances: int) -> list[tuple[int, int]]:
    bins = [(i, i + 1) for i in range(min(EXACT, distances))]
    start = len(bins)
    while start < distances:
        stop = min(distances, max(start + 1, int(start * GROWTH)))
        bins.append((start, stop))
        start = stop
    return bins


@dataclass(frozen=True, eq=False)
class LayerSite:
    """What is the same for all texts in one layer; ``rotation`` where it is known."""

    scale: float
    softcap: float | None
    window: int | None
    heads: int
    kv_heads: int
    dim: int
    rotation: Rotation | None


@dataclass(frozen=True, eq=False)
class LayerSample:
    """All that a layer attends with over a short text, and its output."""

    query: Float[Tensor, "head time dim"]
    key: Float[Tensor, "kv_head time dim"]
    value: Float[Tensor, "kv_head time value_dim"]
    output: Float[Tensor, "head time value_dim"]


@dataclass(frozen=True, eq=False)
class Activations:
    """The texts as every layer saw them, the generated ones last, and the means of its heads over the others."""

    folder: Path
    texts: int
    generated: int
    sites: tuple[LayerSite, ...]
    mean: Float[Tensor, "layer head value_dim"]
    first: Float[Tensor, "layer head"]
    by_distance: Float[Tensor, "layer head distance"]

    def sample(self, layer: int) -> LayerSample:
        """The same layer over the short text that progress is judged by."""
        tensors = np.load(_sample_path(self.folder, layer), allow_pickle=False)
        return LayerSample(**{name: torch.from_numpy(tensors[name]).float() for name in tensors.files})

    def layer(self, layer: int) -> list[LayerText]:
        """Queries and keys of one layer, in float32."""
        heads = self.sites[layer].heads
        texts = []
        for text in range(self.texts):
            both = torch.from_numpy(np.load(_path(self.folder, layer, text), allow_pickle=False)).float()
            written = text >= self.texts - self.generated
            texts.append(LayerText(both[:heads], both[heads:], generated=written))
        return texts


def gather(
    model: Model,
    texts: Sequence[Sequence[int]],
    folder: Path,
    *,
    sample: Sequence[int],
    distances: int,
    generated: Sequence[Sequence[int]] = (),
    rotations: Sequence[Rotation] | None = None,
    report: Callable[[float], None] = lambda share: None,
) -> Activations:
    """Let a model read token sequences and keep what its layers attend with in ``folder``.

    Parameters
    ----------
    texts
        Token ids, one sequence at a time; the whole context of a sequence is seen.
    sample
        A short text that is not fitted on, to show progress by.
    distances
        How far the mean weight by distance reaches; the last entry serves everything beyond.
    generated
        Token ids of text that the model wrote; the means of the heads do not count it.
    rotations
        The rotary embedding of every layer, where it is known.
    report
        Called after every layer of every text with the share of the tokens that is read.
    """
    sums: list[_Means] = []
    layers, done = model.config.get_text_config().num_hidden_layers, 0
    total = sum(map(len, (*texts, *generated)))
    for number, ids in enumerate((*texts, *generated)):

        def visit(layer: LayerTensors, number: int = number, start: int = done, length: int = len(ids)) -> None:
            if layer.layer == len(sums):
                rotation = None if rotations is None else rotations[layer.layer]
                sums.append(_Means(_site(layer, rotation), layer, distances))
            if number < len(texts):
                sums[layer.layer].add(layer)
            both = torch.cat([layer.query, layer.key]).half().cpu().numpy()
            np.save(_path(folder, layer.layer, number), both)
            report((start + length * min(1.0, (layer.layer + 1) / layers)) / total)

        visit_layers(model, ids, visit)
        done += len(ids)
        report(done / total)
    _require_equal_shapes([means.site for means in sums])
    visit_layers(model, sample, lambda layer: _save_sample(folder, layer))
    profiles = [means.profile.result() for means in sums]
    return Activations(
        folder=folder,
        texts=len(texts) + len(generated),
        generated=len(generated),
        sites=tuple(means.site for means in sums),
        mean=torch.stack([means.output / means.count for means in sums]).float(),
        first=torch.stack([first for first, _ in profiles]).float(),
        by_distance=torch.stack([by_distance for _, by_distance in profiles]).float(),
    )


class _Means:
    """Running sums of one layer over all texts."""

    def __init__(self, site: LayerSite, layer: LayerTensors, distances: int) -> None:
        self.site = site
        self.output = torch.zeros(site.heads, layer.value.shape[-1], dtype=torch.float64)
        self.count = 0
        self.profile = ProfileSums(site.heads, distances)

    def add(self, layer: LayerTensors) -> None:
        self.output += layer.output.sum(dim=1, dtype=torch.float64).cpu()
        self.count += layer.output.shape[1]
        self.profile.add(layer.query, layer.key, scale=layer.scale, softcap=layer.softcap, window=self.site.window)


def _site(layer: LayerTensors, rotation: Rotation | None) -> LayerSite:
    if layer.visible.mask is not None:
        raise UnsupportedError(
            f"layer {layer.layer} chooses its keys by a mask of its own, and a calibration needs all keys of a text or "
            "of a window; this model type cannot be calibrated"
        )
    heads, _, dim = layer.query.shape
    return LayerSite(layer.scale, layer.softcap, layer.visible.window, heads, layer.key.shape[0], dim, rotation)


def _require_equal_shapes(sites: Sequence[LayerSite]) -> None:
    shapes = {(site.heads, site.kv_heads, site.dim) for site in sites}
    if len(shapes) > 1:
        raise UnsupportedError(
            f"a calibration needs layers of one shape, got heads, KV heads and dimensions {sorted(shapes)}; "
            "this model type cannot be calibrated"
        )


def _save_sample(folder: Path, layer: LayerTensors) -> None:
    tensors = {field.name: getattr(layer, field.name).half().cpu().numpy() for field in fields(LayerSample)}
    np.savez(_sample_path(folder, layer.layer), **tensors)


def _sample_path(folder: Path, layer: int) -> Path:
    return folder / f"layer-{layer:04d}-shown.npz"


def _path(folder: Path, layer: int, text: int) -> Path:
    return folder / f"layer-{layer:04d}-text-{text:04d}.npy"
