"""Fitting the map of one layer: Adam on the KL divergence from the softmax weights, from landmarks on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from softgap.attention.rotation import Rotation, TurnTable
from softgap.calibration.maps import Maps, Scores, landmark_maps, log_weights, softmax_scores, weights_kl
from softgap.calibration.rows import LayerText, RowPlan, Rows, sample_rows
from softgap.errors import ValueInputError

__all__ = ["Recipe", "fit_maps"]

WARM_UP = 20
FEWEST_FEATURES, MOST_FEATURES = 2, 8192


@dataclass(frozen=True)
class Recipe:
    """Everything a fit depends on besides the texts.

    Attributes
    ----------
    features
        Features per head.
    steps
        Steps of Adam.
    learning_rate
        Of the biases; weights and rates move in proportion to their own size.
    sharpness
        How strongly the first query maps prefer the nearest landmark.
    rows
        What each step looks at.
    seed
        Of landmarks, rows and keys; every layer has a stream of its own.
    """

    features: int = 128
    steps: int = 300
    learning_rate: float = 0.1
    sharpness: float = 1.0
    rows: RowPlan = field(default_factory=RowPlan)
    seed: int = 0

    def __post_init__(self) -> None:
        if not FEWEST_FEATURES <= self.features <= MOST_FEATURES:
            raise ValueInputError(
                f"features must be from {FEWEST_FEATURES} to {MOST_FEATURES}, got {self.features}; 128 is usual"
            )
        if self.steps < 1:
            raise ValueInputError(f"steps must be at least 1, got {self.steps}; 300 is usual")


def fit_maps(
    texts: Sequence[LayerText],
    recipe: Recipe,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    wanted: Callable[[Rows], Scores] | None = None,
    layer: int = 0,
    start: Maps | None = None,
    rotation: Rotation | None = None,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> Maps:
    """The map whose weights are nearest to softmax over these texts.

    Parameters
    ----------
    texts
        Queries and keys of one layer.
    scale
        The model's scaling.
    window
        Positions a query sees, itself included; None for all.
    softcap
        Bound of the model's scores, where it has one.
    wanted
        Unnormalised log-weights to fit; None for the model's own softmax scores.
    layer
        Chooses the layer's own random stream.
    start
        Where to begin; None begins at landmarks.
    rotation
        The layer's rotary embedding: features then see vectors before it too. None shows them as they are only.
    report
        Called with the steps done and the KL divergence of the last one.
    """
    rng = np.random.default_rng([recipe.seed, layer])
    maps = start or landmark_maps(texts, recipe.features, scale, sharpness=recipe.sharpness, rng=rng)
    turns = None
    if rotation is not None:
        turns = TurnTable(rotation, max(text.start + text.length for text in texts))
        maps = maps.widened(2 * texts[0].key.shape[-1] - maps.key_weight.shape[-1])
    tensors = {name: tensor.requires_grad_() for name, tensor in maps.tensors().items()}
    # Weights start at scale times a query; a step moves all numbers by a like share of their size.
    pace = {"query_weight": scale * recipe.sharpness, "key_weight": scale, "log_rate": 3.0}
    rates = [recipe.learning_rate * pace.get(name, 1.0) for name in tensors]
    groups = [{"params": [tensor]} for tensor in tensors.values()]
    optimiser = torch.optim.Adam(groups, betas=(0.9, 0.99))
    for step in range(recipe.steps):
        eased = min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = rate * eased
        rows = sample_rows(texts, recipe.rows, window=window, turns=turns, rng=rng)
        target = softmax_scores(rows, scale, softcap) if wanted is None else wanted(rows)
        loss = weights_kl(target, log_weights(maps, rows), rows).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        report(step + 1, loss.item())
    return Maps(**{name: tensor.detach() for name, tensor in tensors.items()})
