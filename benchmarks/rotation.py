"""Whether fitted features should see vectors before rotary embedding too, or texts at random offsets.

Run: python benchmarks/rotation.py --text FILE [--layers 5 14 22]

Features of rotated vectors know absolute positions. Two remedies are tried in a few layers of the embedded model, with
the first half of the file to fit on and the second to judge by: features of rotated and un-rotated vectors together,
and every text of the fit at several offsets. Scores depend on differences of positions only, so the target is the same.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from harness import FINDINGS, machine, write_section
from recipe import BINS, HELD_OUT, layers_of
from softgap.attention import resolve
from softgap.calibration import Recipe, fit_maps
from softgap.calibration.curve import HeldLayer, divergences
from softgap.calibration.maps import Maps, Scores, landmark_maps, softmax_scores
from softgap.calibration.rows import LayerText, Rows
from softgap.probe import load_model

RECIPE = Recipe(steps=300)
OFFSETS = (0, 911, 2718, 5077)
# How far held-out text is moved to see whether a map knows where it was fitted; no offset of the fit.
MOVED = 4000


@dataclass(frozen=True)
class Variant:
    """What features see, and at which offsets texts are shown to the fit."""

    name: str
    unrotated: bool = False
    offsets: tuple[int, ...] = (0,)


VARIANTS = (
    Variant("rotated vectors (the default)"),
    Variant("rotated and un-rotated vectors", unrotated=True),
    Variant("rotated vectors, every text at 4 offsets", offsets=OFFSETS),
    Variant("rotated and un-rotated vectors, every text at 4 offsets", unrotated=True, offsets=OFFSETS),
)


def turned(model: Any, x: Tensor, by: Tensor) -> Tensor:
    """Vectors moved by so many positions, as the model's rotary embedding turns them."""
    cos, sin = model.model.rotary_emb(x, by[None])
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def seen(model: Any, x: Tensor, variant: Variant, offset: int) -> Tensor:
    """What the features are made of: the vectors at their position plus the offset, and before rotary embedding."""
    rotated = turned(model, x, torch.full((x.shape[1],), offset)) if offset else x
    if not variant.unrotated:
        return rotated
    return torch.cat([rotated, turned(model, x, -torch.arange(x.shape[1]))], dim=-1)


def fitted_maps(model: Any, variant: Variant, texts: Sequence[LayerText], scale: float, layer: int) -> Maps:
    """Fit one layer, from landmarks of the rotated vectors; the scores to fit are those of the rotated vectors."""
    size = texts[0].key.shape[-1]
    start = landmark_maps(texts, RECIPE.features, scale, rng=np.random.default_rng(0))
    if variant.unrotated:
        wider = {"query_weight": start.query_weight, "key_weight": start.key_weight}
        start = replace(start, **{name: functional.pad(weight, (0, size)) for name, weight in wider.items()})

    def wanted(rows: Rows) -> Scores:
        return softmax_scores(replace(rows, query=rows.query[..., :size], key=rows.key[..., :size]), scale)

    shown = [
        LayerText(seen(model, text.query, variant, offset), seen(model, text.key, variant, offset))
        for text in texts
        for offset in variant.offsets
    ]
    return fit_maps(shown, RECIPE, scale=scale, layer=layer, start=start, wanted=wanted)


def sums(model: Any, variant: Variant, maps: Maps, layer: HeldLayer, offset: int) -> np.ndarray:
    """Divergence of the fitted map and of the mean of values by range of positions, summed over texts and heads."""
    mechanism = resolve("fitted").with_parameters(**maps.parameters())
    texts = [
        replace(x, query=seen(model, x.query, variant, offset), key=seen(model, x.key, variant, offset))
        for x in layer.texts
    ]
    found = np.zeros((len(BINS), 2))
    for mine, uniform in zip(divergences(mechanism, texts), layer.uniform, strict=True):
        for i, bounds in enumerate(BINS):
            if mine.shape[-1] >= bounds.stop and (mine.shape[-1] <= 2048 or bounds.start >= 2048):
                part = slice(bounds.start, bounds.stop)
                found[i] += mine[:, part].sum().item(), uniform[:, part].sum().item()
    return found


def main() -> None:
    """Fit every variant, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", required=True)
    parser.add_argument("--layers", type=int, nargs="+", default=[5, 14, 22])
    options = parser.parse_args()
    model, tokenizer = load_model()
    layers = layers_of(model, tokenizer, Path(options.text).read_text(), options.layers)
    rows = []
    for variant in VARIANTS:
        total = np.zeros((2, len(BINS), 2))
        for number, (texts, layer) in enumerate(layers):
            maps = fitted_maps(model, variant, texts, layer.texts[0].scale, number)
            total += np.stack([sums(model, variant, maps, layer, offset) for offset in (0, MOVED)])
        closed = 1 - total[..., 0] / total[..., 1]
        rows.append(f"| {variant.name} | " + " | ".join(f"{x:.3f}" for x in [*closed[0], *closed[1, :3]]) + " |")
        print(rows[-1], flush=True)
    names = [f"{bounds.start}-{bounds.stop}" for bounds in BINS]
    columns = [*names, *(f"{name}, moved" for name in names[:3])]
    write_section(
        "rotation",
        "Features before and after rotary embedding",
        f"`python benchmarks/rotation.py --text FILE` on layers {', '.join(map(str, options.layers))} of the embedded "
        f"model; {machine()}. Share of the gap to the mean of values closed on held-out text ({HELD_OUT[2048]} "
        f"sequences of 2,048 tokens, {HELD_OUT[8192]} of 8,192), by positions, with {RECIPE.features} features and "
        f"{RECIPE.steps} steps; `moved` judges the same texts {MOVED:,} positions further on.\n\n"
        f"| what features see | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}\n" + "\n".join(rows),
        page=FINDINGS,
    )


if __name__ == "__main__":
    main()
