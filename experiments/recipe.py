"""How the recipe of the calibration was found: one thing changed at a time, in a few layers of the embedded model.

Run: python experiments/recipe.py --text FILE [--layers 5 14 22] [--only recipe|minutes|division]
     python experiments/recipe.py --text FILE --only pace --model gemma-3-270m --layers 5 14 17

The first half of the file is fitted on, the second half is held out.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import numpy as np
import torch

from harness import FINDINGS, machine, write_section
from held_out import halves, sequences
from softgap.attention import ExactSet, Mechanism, resolve
from softgap.attention.memory import divide_features, equal_window, keys_per_feature
from softgap.attention.rotary import Rotation
from softgap.calibration import Recipe, fit_maps
from softgap.calibration import fit as fit_of_layers
from softgap.calibration.fit import LayerText, Maps, RowPlan, landmark_maps
from softgap.calibration.held_out import HeldLayer, divergences, held_layers
from softgap.calibration.texts import corpus_of, generate_texts, tokens_needed
from softgap.models import load_model
from softgap.models.catalogue import EMBEDDED
from softgap.models.loading import Model, Tokenizer
from softgap.models.tokens import token_ids
from softgap.probe.layout import layer_rotations

PACE_POSITIONS = 2048
BINS = (range(64, 512), range(512, 1024), range(1024, 2048), range(4096, 8192))
HELD_OUT = {2048: 4, 8192: 1}
# The table was begun at this learning rate; its last word on it became the default.
SHORT = Recipe(steps=300, learning_rate=0.05)


@dataclass(frozen=True)
class Variant:
    """A recipe, what it starts from and fits to besides, and the exact set of a hybrid."""

    name: str
    recipe: Recipe = SHORT
    start: str = "landmarks"
    decay: bool = True
    longest: int = 8192
    exact: ExactSet | None = None


VARIANTS = (
    Variant("300 steps"),
    Variant("600 steps", replace(SHORT, steps=600)),
    Variant("1,200 steps", replace(SHORT, steps=1200)),
    Variant("without decay", decay=False),
    Variant("random start instead of landmarks", start="random"),
    Variant("fitted at 512 tokens only", longest=512),
    Variant("fitted at 2,048 tokens at most", longest=2048),
    Variant("1 block of 64 rows, 192 near and 192 far keys", replace(SHORT, rows=RowPlan(1, 64, 4, 192, 192))),
    Variant("4 blocks of 16 rows, 96 near and 96 far keys", replace(SHORT, rows=RowPlan(4, 16, 4, 96, 96))),
    Variant("no sinks apart", replace(SHORT, rows=RowPlan(8, 8, 0, 64, 68))),
    Variant("learning rate 0.02", replace(SHORT, learning_rate=0.02)),
    Variant("learning rate 0.1", replace(SHORT, learning_rate=0.1)),
    Variant("sharpness 0.5", replace(SHORT, sharpness=0.5)),
    Variant("sharpness 2", replace(SHORT, sharpness=2.0)),
    Variant("16 features", replace(SHORT, features=16)),
    Variant("32 features", replace(SHORT, features=32)),
    Variant("64 features", replace(SHORT, features=64)),
    Variant("256 features", replace(SHORT, features=256)),
)


# Shares of a hybrid's memory that go to features, and sinks.
DIVISIONS = ((0.125, 4), (0.25, 4), (0.5, 4), (0.75, 4), (0.25, 1), (0.25, 16))


def started(variant: Variant, texts: Sequence[LayerText], scale: float) -> Maps:
    """Where the fit of a variant begins."""
    rng = np.random.default_rng(0)
    maps = landmark_maps(texts, variant.recipe.features, scale, sharpness=variant.recipe.sharpness, rng=rng)
    if variant.start == "random":
        shape = (*maps.key_weight.shape[:1], variant.recipe.features // 2, maps.key_weight.shape[-1])
        half = 0.5 * scale**0.5 * rng.standard_normal(shape)
        weight = torch.from_numpy(np.concatenate([half, -half], axis=1)).float()
        query = weight[:, None].expand_as(maps.query_weight).clone()
        maps = replace(maps, key_weight=weight, query_weight=query, query_bias=torch.zeros_like(maps.query_bias))
    # The gradient of a rate is in proportion to the rate: one of e^-30 stays there.
    return maps if variant.decay else replace(maps, log_rate=torch.full_like(maps.log_rate, -30.0))


Layers = Sequence[tuple[list[LayerText], HeldLayer]]


def table_row(
    variant: Variant, layers: Layers, seconds: list[float], rotations: Sequence[Rotation] | None = None
) -> str:
    """One row of the table, of layers with the texts to fit on and those to evaluate on; adds the time of each fit.

    With rotations the features see vectors before rotary embedding too, as those of a calibration do.
    """
    sums = np.zeros((len(BINS), 2))
    for number, (fit, layer) in enumerate(layers):
        rotation = None if rotations is None else rotations[layer.number]
        texts = [LayerText(x.query[:, : variant.longest], x.key[:, : variant.longest]) for x in fit]
        scale = layer.texts[0].scale
        begun = time.process_time()
        start = started(variant, texts, scale)
        window = layer.texts[0].visible.window
        maps = fit_maps(
            texts, variant.recipe, scale=scale, window=window, layer=number, start=start, rotation=rotation,
            exact=variant.exact,
        )  # fmt: skip
        seconds.append(time.process_time() - begun)
        sums += left_by_position(maps.mechanism(rotation, variant.exact), layer)
    return row_of(variant.name, sums)


def left_by_position(mechanism: str | Mechanism, layer: HeldLayer) -> np.ndarray:
    """Sums of the divergence of a mechanism and of the mean of values in a layer, by range of positions."""
    sums = np.zeros((len(BINS), 2))
    for divergence, uniform in zip(divergences(mechanism, layer.texts), layer.uniform, strict=True):
        for i, bounds in enumerate(BINS):
            # Long texts judge far positions only, so that near ones weigh equally in all rows.
            if (divergence.shape[-1] >= bounds.stop) and (divergence.shape[-1] <= 2048 or bounds.start >= 2048):
                part = slice(bounds.start, bounds.stop)
                sums[i] += divergence[:, part].sum().item(), uniform[:, part].sum().item()
    return sums


def row_of(name: str, sums: np.ndarray) -> str:
    """A row of a table, from such sums over layers."""
    return f"| {name} | {' | '.join(f'{1 - top / bottom:.3f}' for top, bottom in sums)} |"


def write_division(layers: Layers, model: Model, options: argparse.Namespace) -> None:
    """How a hybrid divides its memory between features and exact keys, beside fitted map and window of that memory."""
    recipe = replace(Recipe(), rows=replace(Recipe().rows, generated=0.0))
    rotations, dim = layer_rotations(model), layers[0][1].texts[0].key.shape[-1]
    keys = round(recipe.features * keys_per_feature(dim))
    rows = []

    def tell(row: str) -> None:
        rows.append(row)
        print(row, flush=True)

    for share, sinks in DIVISIONS:
        features, exact = divide_features(recipe.features, dim, share=share, sinks=sinks)
        name = f"hybrid, {features} features, {exact.sinks} sinks and {exact.recent} recent keys"
        tell(table_row(Variant(name, replace(recipe, features=features), exact=exact), layers, [], rotations))
    tell(table_row(Variant(f"fitted, {recipe.features} features", recipe), layers, [], rotations))
    for sinks in (1, 4, 16):
        window = f"window:w={keys - sinks},sinks={sinks}"
        tell(row_of(window, np.sum([left_by_position(window, layer) for _, layer in layers], axis=0)))
    write_section(
        "recipe-division",
        "How a hybrid divides its memory",
        f"`python experiments/recipe.py --text FILE --layers {' '.join(map(str, options.layers))} --only division` on "
        f"these layers of the embedded model; {machine()}. Share of the gap closed on "
        f"held-out text by positions; every row keeps as much as {keys} keys with their values. The default recipe, "
        "but without generated text.\n\n"
        "| what | 64-512 | 512-1024 | 1024-2048 | 4096-8192 |\n|---|---|---|---|---|\n" + "\n".join(rows),
        page=FINDINGS,
    )


def write_minutes(layers: Layers, model_layers: Layers, model: Model, options: argparse.Namespace) -> None:
    """The gap closed against the time of the fit, with the default recipe, and on text that the model wrote itself."""
    rows = []
    rotations, whole = layer_rotations(model), model.config.num_hidden_layers
    for steps in (75, 150, 300, 600, 1200):
        variant = Variant("the file", replace(Recipe(), steps=steps))
        fits: list[float] = []
        row = table_row(variant, layers, fits, rotations)
        rows.append(f"| {steps:,} | {sum(fits) / len(layers) * whole / 60:.1f} {row}")
        print(rows[-1], flush=True)
    for name, texts in (("the file, 2,048 tokens at most", layers), ("the model's own, as long", model_layers)):
        rows.append(f"| {Recipe().steps} |  {table_row(Variant(name, Recipe(), longest=2048), texts, [], rotations)}")
        print(rows[-1], flush=True)
    write_section(
        "recipe-minutes",
        "The gap against the minutes of a fit",
        "`python experiments/recipe.py --text FILE --only minutes` on layers "
        f"{', '.join(map(str, options.layers))} of the embedded model; {machine()}. Share of the gap closed on "
        f"held-out text by positions. Minutes of processor time that all {whole} layers would take on one thread "
        "(two cores fit two layers at a time), without reading and judging.\n\n"
        "| steps | minutes | text of the fit | 64-512 | 512-1024 | 1024-2048 | 4096-8192 |\n"
        "|---|---|---|---|---|---|---|\n" + "\n".join(rows),
        page=FINDINGS,
    )


def write_pace(model: Model, tokenizer: Tokenizer, options: argparse.Namespace) -> None:
    """How far a step should move the weights of a map, layer by layer, beside a hybrid and a window of equal memory."""
    fit_text, held = halves(Path(options.text).read_text())
    texts = sequences(token_ids(tokenizer, held), {PACE_POSITIONS // 2: 2})[PACE_POSITIONS // 2]
    corpus = corpus_of(model, tokenizer, [fit_text], positions=PACE_POSITIONS)
    fitted, held_out = (held_layers(model, of, options.layers) for of in (corpus.fitted, texts))
    rotations, dim = layer_rotations(model), fitted[0].texts[0].key.shape[-1]
    tail, exact = divide_features(Recipe().features, dim)
    default = min(1.0, fit_of_layers.TUNED_DIM / dim)
    sides: dict[str, tuple[float, Recipe, ExactSet | None]] = {
        f"fitted, pace {pace:g}": (pace, Recipe(), None) for pace in sorted({*options.paces, default}, reverse=True)
    }
    sides["hybrid of the same memory"] = (default, replace(Recipe(), features=tail), exact)
    rows, whole = [], resolve("uniform")
    for name, (pace, recipe, kept) in sides.items():
        # Weights move by scale * min(1, TUNED_DIM / dim).
        fit_of_layers.TUNED_DIM = pace * dim  # type: ignore[assignment]
        cells = []
        for number, (seen, unseen) in enumerate(zip(fitted, held_out, strict=True)):
            rotation, shown = None if rotations is None else rotations[unseen.number], seen.texts[0]
            maps = fit_maps(
                [LayerText(x.query, x.key) for x in seen.texts], recipe, scale=shown.scale,
                window=shown.visible.window, softcap=shown.softcap, layer=number, rotation=rotation, exact=kept,
            )  # fmt: skip
            mechanism = maps.mechanism(rotation, kept)
            whole = mechanism if kept is None else whole
            cells += [" / ".join(f"{closed(mechanism, of):.3f}" for of in (unseen, seen))]
        rows.append(f"| {name} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    window = equal_window(whole, dim)
    cells = [" / ".join(f"{closed(window, of):.3f}" for of in pair) for pair in zip(held_out, fitted, strict=True)]
    rows.append(f"| {window}, the same memory | {' | '.join(cells)} |")
    slides = [layer.texts[0].visible.window is not None for layer in fitted]
    names = [f"layer {layer.number}{' (slides)' if x else ''}" for layer, x in zip(fitted, slides, strict=True)]
    write_section(
        f"recipe-pace-{options.model}",
        f"How far a step moves the weights of a map: {options.model}",
        f"`python experiments/recipe.py --text FILE --only pace --model {options.model} --layers "
        f"{' '.join(map(str, options.layers))} --paces {' '.join(f'{x:g}' for x in options.paces)}`; {machine()}. "
        f"Heads of {dim} numbers; the default recipe but without generated text, fitted on text of up to "
        f"{PACE_POSITIONS:,} tokens. Share of the gap closed from position 64 on: on two held-out texts of "
        f"{PACE_POSITIONS // 2:,} tokens / on two texts of the fit. The pace of the recipe is min(1, 64 / d), here "
        f"{default:g}.\n\n| | {' | '.join(names)} |\n|---|{'---|' * len(names)}\n" + "\n".join(rows),
        page=FINDINGS,
    )


def closed(mechanism: str | Mechanism, layer: HeldLayer) -> float:
    """The share of the gap that a mechanism closes in a layer, from position 64 on, in its first two texts."""
    found = zip(divergences(mechanism, layer.texts[:2]), layer.uniform, strict=False)
    top, bottom = np.sum([(x[:, 64:].sum(), uniform[:, 64:].sum()) for x, uniform in found], axis=0)
    return float(1 - top / bottom)


def layers_of(model: Model, tokenizer: Tokenizer, text: str, numbers: Sequence[int]) -> Layers:
    """Some layers with the texts of the first half of a file to fit on, and those of the second to evaluate on."""
    fit, held = halves(text)
    held_out = [ids for part in sequences(token_ids(tokenizer, held), HELD_OUT).values() for ids in part]
    fitted = held_layers(model, corpus_of(model, tokenizer, [fit], positions=8192).fitted, numbers)
    return [
        ([LayerText(x.query, x.key) for x in fit_layer.texts], held_out_layer)
        for fit_layer, held_out_layer in zip(fitted, held_layers(model, held_out, numbers), strict=True)
    ]


def main() -> None:
    """Fit every variant, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", required=True)
    parser.add_argument("--layers", type=int, nargs="+", default=[5, 14, 22])
    parser.add_argument("--only", choices=["recipe", "minutes", "pace", "division"], default="recipe")
    parser.add_argument("--paces", type=float, nargs="+", default=[1.0], help="compared with the recipe's own")
    parser.add_argument("--model", default=EMBEDDED, help="of the pace alone; the other tables are of the embedded one")
    options = parser.parse_args()
    if options.only == "pace":
        torch.set_num_threads(1)
        write_pace(*load_model(options.model), options)
        return
    model, tokenizer = load_model()
    layers = layers_of(model, tokenizer, Path(options.text).read_text(), options.layers)
    if options.only == "minutes":
        torch.set_num_threads(1)
        texts = generate_texts(model, tokenizer, 3 * tokens_needed(2048))
        fit_layers = held_layers(model, corpus_of(model, tokenizer, texts, positions=2048).fitted, options.layers)
        model_layers = [
            ([LayerText(x.query, x.key) for x in fit_layer.texts], held_out_layer)
            for fit_layer, (_, held_out_layer) in zip(fit_layers, layers, strict=True)
        ]
        write_minutes(layers, model_layers, model, options)
        return
    if options.only == "division":
        write_division(layers, model, options)
        return
    rows = []
    for variant in VARIANTS:
        rows.append(table_row(variant, layers, []))
        print(rows[-1], flush=True)
    write_section(
        "recipe",
        "The recipe of the calibration",
        f"`python experiments/recipe.py --text FILE` on layers {', '.join(map(str, options.layers))} of the embedded "
        f"model; {machine()}. Share of the gap to the mean of values that the fitted map closes on held-out text "
        f"({HELD_OUT[2048]} sequences of 2,048 tokens, {HELD_OUT[8192]} of 8,192), by positions. The first row takes "
        "300 steps at a learning rate of 0.05, with 128 features of rotated vectors and all else as by default; every "
        "other row changes what it says.\n\n"
        "| what | 64-512 | 512-1024 | 1024-2048 | 4096-8192 |\n|---|---|---|---|---|\n" + "\n".join(rows),
        page=FINDINGS,
    )


if __name__ == "__main__":
    main()
