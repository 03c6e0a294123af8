"""Why fitted features see vectors before rotary embedding too, and what texts at several offsets would add.

Run: python experiments/rotation.py --text FILE [--layers 5 14 22]

Features of rotated vectors know absolute positions. Two remedies are tried in a few layers of the embedded model, with
the first half of the file to fit on and the second to judge by: features of rotated and un-rotated vectors together (as
a calibration has them), and every text of the fit at several offsets. Scores depend on differences of positions only,
so the target is the same.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import numpy as np
import torch
from torch import Tensor

from harness import FINDINGS, machine, write_section
from recipe import BINS, HELD_OUT, layers_of
from softgap.attention import Mechanism
from softgap.attention.rotary import Rotation
from softgap.calibration import Recipe, fit_maps
from softgap.calibration.fit import LayerText, RowPlan, landmark_maps
from softgap.calibration.held_out import HeldLayer, divergences
from softgap.models import load_model
from softgap.probe.layout import layer_rotations

RECIPE = Recipe(steps=300, rows=RowPlan(moved=0.0))  # the texts are moved here
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
    Variant("rotated vectors"),
    Variant("rotated and un-rotated vectors (the default)", unrotated=True),
    Variant("rotated vectors, every text at 4 offsets", offsets=OFFSETS),
    Variant("rotated and un-rotated vectors, every text at 4 offsets", unrotated=True, offsets=OFFSETS),
)


def moved(rotation: Rotation, x: Tensor, offset: int) -> Tensor:
    """The vectors of a text as the model has them so many positions further on."""
    return rotation.turned(x, torch.full((x.shape[1],), offset)) if offset else x


def fitted_maps(
    rotation: Rotation, variant: Variant, texts: Sequence[LayerText], scale: float, layer: int
) -> Mechanism:
    """Fit one layer, from landmarks of the rotated vectors at their first offset."""
    start = landmark_maps(texts, RECIPE.features, scale, rng=np.random.default_rng(0))
    shown = [
        LayerText(moved(rotation, text.query, offset), moved(rotation, text.key, offset), offset)
        for text in texts
        for offset in variant.offsets
    ]
    used = rotation if variant.unrotated else None
    return fit_maps(shown, RECIPE, scale=scale, layer=layer, start=start, rotation=used).mechanism(used)


def sums(rotation: Rotation, mechanism: Mechanism, layer: HeldLayer, offset: int) -> np.ndarray:
    """Divergence of the fitted map and of the mean of values by range of positions, summed over texts and heads."""
    origin = torch.tensor([offset])
    texts = [
        replace(
            x,
            query=moved(rotation, x.query, offset),
            key=moved(rotation, x.key, offset),
            visible=replace(x.visible, origin=origin),
        )
        for x in layer.texts
    ]
    totals = np.zeros((len(BINS), 2))
    for divergence, uniform in zip(divergences(mechanism, texts), layer.uniform, strict=True):
        for i, bounds in enumerate(BINS):
            if divergence.shape[-1] >= bounds.stop and (divergence.shape[-1] <= 2048 or bounds.start >= 2048):
                part = slice(bounds.start, bounds.stop)
                totals[i] += divergence[:, part].sum().item(), uniform[:, part].sum().item()
    return totals


def main() -> None:
    """Fit every variant, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", required=True)
    parser.add_argument("--layers", type=int, nargs="+", default=[5, 14, 22])
    parser.add_argument("--first", type=int, default=len(VARIANTS), help="fit only so many of the variants, print only")
    options = parser.parse_args()
    model, tokenizer = load_model()
    rotations = layer_rotations(model)
    if rotations is None:
        raise SystemExit("the rotary embedding of the embedded model was not recognised")
    layers = layers_of(model, tokenizer, Path(options.text).read_text(), options.layers)
    rows = []
    for variant in VARIANTS[: options.first]:
        total = np.zeros((2, len(BINS), 2))
        for number, (texts, layer) in enumerate(layers):
            rotation = rotations[layer.number]
            mechanism = fitted_maps(rotation, variant, texts, layer.texts[0].scale, number)
            total += np.stack([sums(rotation, mechanism, layer, offset) for offset in (0, MOVED)])
        closed = 1 - total[..., 0] / total[..., 1]
        rows.append(f"| {variant.name} | " + " | ".join(f"{x:.3f}" for x in [*closed[0], *closed[1, :3]]) + " |")
        print(rows[-1], flush=True)
    if len(rows) < len(VARIANTS):
        return
    names = [f"{bounds.start}-{bounds.stop}" for bounds in BINS]
    columns = [*names, *(f"{name}, moved" for name in names[:3])]
    write_section(
        "rotation",
        "Features before and after rotary embedding",
        f"`python experiments/rotation.py --text FILE` on layers {', '.join(map(str, options.layers))} of the embedded "
        f"model; {machine()}. Share of the gap to the mean of values closed on held-out text ({HELD_OUT[2048]} "
        f"sequences of 2,048 tokens, {HELD_OUT[8192]} of 8,192), by positions, with {RECIPE.features} features and "
        f"{RECIPE.steps} steps; `moved` judges the same texts {MOVED:,} positions further on.\n\n"
        f"| what features see | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}\n" + "\n".join(rows),
        page=FINDINGS,
    )


if __name__ == "__main__":
    main()
