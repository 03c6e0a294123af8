"""How far the gap closes with more or fewer features, in a few layers of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from jaxtyping import Float

from softgap.attention import Mechanism, attend, compare_outputs
from softgap.calibration.fit import Recipe, fit_maps
from softgap.calibration.gather import Gathered
from softgap.calibration.held_out import Closed, gap_closed
from softgap.probe.models import Model
from softgap.probe.tensors import LayerTensors, visit_layers

__all__ = ["FEATURES", "LAYERS", "HeldLayer", "divergences", "feature_curve", "held_layers", "some_layers"]

FEATURES = (16, 32, 64, 128, 256)
LAYERS = 3
STEPS = 75
TEXTS, TOKENS = 3, 1024


@dataclass(frozen=True, eq=False)
class HeldLayer:
    """One layer on held-out texts, with the divergence of the mean of values there."""

    number: int
    texts: tuple[LayerTensors, ...]
    uniform: tuple[Float[np.ndarray, "head time"], ...]


def divergences(mechanism: str | Mechanism, texts: Sequence[LayerTensors]) -> tuple[np.ndarray, ...]:
    """Divergence of a mechanism from the model's output, text by text."""
    return tuple(
        compare_outputs(
            x.output,
            attend(mechanism, x.query[None], x.key[None], x.value[None], visible=x.visible, scale=x.scale).output[0],
        ).divergence.numpy()
        for x in texts
    )


def held_layers(model: Model, texts: Sequence[Sequence[int]], layers: Sequence[int]) -> tuple[HeldLayer, ...]:
    """Some layers of a model as held-out texts show them."""

    def visit(layer: LayerTensors) -> LayerTensors | None:
        if layer.layer not in layers:
            return None
        tensors = {name: getattr(layer, name).cpu().clone() for name in ("query", "key", "value", "output")}
        return replace(layer, **tensors)

    read = [visit_layers(model, ids, visit) for ids in texts]
    found = []
    for number in layers:
        mine = tuple(layer for text in read if (layer := text[number]) is not None)
        found.append(HeldLayer(number, mine, divergences("uniform", mine)))
    return tuple(found)


def some_layers(model: Model, held_out: Sequence[Sequence[int]], layers: int) -> tuple[HeldLayer, ...]:
    """Layers spread evenly over a model, on the beginnings of a few held-out texts."""
    numbers = sorted({int(x) for x in np.linspace(0, layers - 1, LAYERS + 2)[1:-1]})
    return held_layers(model, [ids[:TOKENS] for ids in held_out[:TEXTS]], numbers)


def feature_curve(
    layers: Sequence[HeldLayer],
    gathered: Gathered,
    recipe: Recipe,
    *,
    workers: int = 1,
    report: Callable[[float], None] = lambda share: None,
) -> Mapping[str, Closed]:
    """The share of the gap closed on held-out text by number of features, in these layers.

    It is for comparing numbers of features with each other: fits are short, of at most ``STEPS`` steps. ``workers`` of
    them run at a time, the longest first.
    """
    short = replace(recipe, steps=min(recipe.steps, STEPS))

    def divergences_of(layer: HeldLayer, features: int) -> tuple[np.ndarray, ...]:
        site = gathered.sites[layer.number]
        maps = fit_maps(
            gathered.layer(layer.number),
            replace(short, features=features),
            scale=site.scale,
            window=site.window,
            softcap=site.softcap,
            rotation=site.rotation,
            layer=layer.number,
        )
        return divergences(maps.mechanism(site.rotation), layer.texts)

    mine: dict[int, list[Sequence[np.ndarray]]] = {features: [] for features in FEATURES}
    asked = [(layer, features) for features, layer in product(reversed(FEATURES), layers)]
    with ThreadPoolExecutor(workers) as pool:
        for done, (one, found) in enumerate(
            zip(asked, pool.map(divergences_of, *zip(*asked, strict=True)), strict=True)
        ):
            mine[one[1]].append(found)
            report((done + 1) / len(asked))
    uniform = _by_text([layer.uniform for layer in layers])
    rng = np.random.default_rng(recipe.seed)
    closed = {str(features): gap_closed(_by_text(found), uniform, rng=rng) for features, found in mine.items()}
    return {name: found for name, found in closed.items() if found is not None}


def _by_text(layers: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Layers of texts to texts of layers."""
    return [np.stack(text) for text in zip(*layers, strict=True)]
