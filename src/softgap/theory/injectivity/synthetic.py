"""The injectivity lab on synthetic keys: which mechanisms can tell any two queries apart (Han et al. 2024)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from softgap.attention import Mechanism, mechanisms, resolve
from softgap.attention import feature_maps as maps
from softgap.errors import ValueInputError
from softgap.inputs import as_items
from softgap.theory.claims import Claim
from softgap.theory.injectivity.collision_search import Search, find_collision
from softgap.theory.injectivity.collisions import (
    Collision,
    affine_collision,
    certify,
    elu1_collision,
    mechanism_weights,
    multiples_collision,
    softmax_collision,
)
from softgap.theory.injectivity.inversion import KeyCondition, inline_query, key_condition
from softgap.theory.injectivity.margins import (
    MarginSweep,
    Prefix,
    flat_keys,
    log_margin_sweep,
    prefixes,
    weight_margin_sweep,
)
from softgap.theory.injectivity.synthetic_claims import synthetic_claims
from softgap.trajectories.display import Displayed

__all__ = ["Injectivity", "InlineShown", "injectivity_lab", "searchable"]

Progress = Callable[[str, float], None]


@dataclass(frozen=True, eq=False)
class InlineShown:
    """InLine attention under the rank condition, and what relu does to it.

    ``error`` is the largest relative error of queries recovered from its weights; ``relu`` a collision of the same
    mechanism on relu features: two queries that differ in a negative coordinate only.
    """

    error: float
    relu: Collision


@dataclass(frozen=True, eq=False, repr=False)
class Injectivity(Displayed):
    """What the lab found on synthetic keys.

    Attributes
    ----------
    prefixes
        Softmax over few and many keys.
    flat, flat_collision
        Keys on a hyperplane: their condition, and two queries softmax gives one distribution over them.
    log_sweep, weight_sweep
        The inverter's error against either margin.
    exact
        Constructed collisions: relu, elu1, relu_affine.
    inline
        The injective linear attention.
    searches
        What the finder made of every mechanism.
    wide
        The finder on relu(A x + b) with twice as many units as dimensions.
    """

    prefixes: tuple[Prefix, ...]
    flat: KeyCondition
    flat_collision: Collision
    log_sweep: MarginSweep
    weight_sweep: MarginSweep
    exact: tuple[Collision, ...]
    inline: InlineShown
    searches: tuple[Search, ...]
    wide: Search
    settings: dict[str, Any]

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The verdicts, read from the fields above."""
        return synthetic_claims(self)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "lab": "injectivity",
            "settings": self.settings,
            "claims": [claim.to_json() for claim in self.claims],
            "prefixes": [dataclasses.asdict(prefix) for prefix in self.prefixes],
            "flat": {**dataclasses.asdict(self.flat), "collision": self.flat_collision.to_json()},
            "log_sweep": _sweep_json(self.log_sweep),
            "weight_sweep": _sweep_json(self.weight_sweep),
            "exact": [collision.to_json() for collision in self.exact],
            "inline": {"error": self.inline.error, "relu": self.inline.relu.to_json()},
            "searches": [search.to_json() for search in self.searches],
            "wide": self.wide.to_json(),
        }


def injectivity_lab(
    *,
    rng: np.random.Generator,
    dim: int = 8,
    keys: int = 48,
    draws: int = 20,
    starts: int = 8,
    queries: int = 2,
    mechanisms: Sequence[str | Mechanism] | None = None,
    progress: Progress | None = None,
) -> Injectivity:
    """Run the claims about injectivity on standard normal keys.

    Parameters
    ----------
    dim, keys
        Size of a query, and number of keys where the rank condition should hold; more keys than ``dim``.
    draws
        Random keys per prefix length, and random queries for InLine.
    starts, queries
        Effort of the collision finder, see :func:`find_collision`.
    mechanisms
        What the finder looks at; every registered mechanism that has weights and needs no parameters by default.
    progress
        Called with what is being done and the share of it that is done.
    """
    chosen = _checked(dim, keys, draws, mechanisms)
    tell = progress or (lambda *_: None)
    scale = dim**-0.5
    tell("margins", 0.0)
    lengths = sorted({2, *range(max(2, dim - 3), dim + 5), 2 * dim, keys})
    matrix, query = rng.standard_normal((keys, dim)), rng.standard_normal(dim)
    flat = flat_keys(dim, keys, rng)
    searches = []
    for i, mechanism in enumerate(chosen):
        tell(f"looking for collisions of {mechanism.name}", (1 + i) / (2 + len(chosen)))
        searches.append(find_collision(mechanism, matrix, rng=rng, queries=queries, starts=starts))
    return Injectivity(
        prefixes=prefixes(dim, lengths, draws=draws, rng=rng),
        flat=key_condition(flat),
        flat_collision=softmax_collision(query, flat, scale=scale),
        log_sweep=log_margin_sweep(dim, keys, np.geomspace(1e-1, 1e-6, 11).tolist(), noise=1e-8, rng=rng),
        weight_sweep=weight_margin_sweep(dim, keys, np.geomspace(0.5, 8, 9).tolist(), noise=1e-4, rng=rng),
        exact=_exact(matrix, query, scale, rng),
        inline=_inline(matrix, scale, draws, rng),
        searches=tuple(searches),
        wide=find_collision(_wide(dim, rng), matrix, rng=rng, queries=queries, starts=starts),
        settings={
            **{"dim": dim, "keys": keys, "draws": draws, "starts": starts, "queries": queries},
            "mechanisms": [mechanism.name for mechanism in chosen],
        },
    )


def _checked(dim: int, keys: int, draws: int, wanted: Sequence[str | Mechanism] | None) -> list[Mechanism]:
    """The mechanisms, if they and the sizes can be worked with."""
    if keys < 2:
        raise ValueInputError(
            f"a key matrix needs at least 2 rows, got {keys}; with one key every query has the same weights"
        )
    if dim < 2 or keys < dim + 2:
        raise ValueInputError(
            f"dim must be at least 2 and keys at least dim + 2, got dim {dim} and keys {keys}; use more keys"
        )
    if draws < 1:
        raise ValueInputError(f"draws must be at least 1, got {draws}")
    chosen = [resolve(name) for name in (searchable() if wanted is None else as_items(wanted))]
    for mechanism in chosen:
        # Says what is missing, before any work is done.
        mechanism.site(torch.arange(1), torch.float64)
    return chosen


def searchable() -> list[str]:
    """Registered mechanisms that have weights and wait for no parameters."""
    return [name for name, found in mechanisms().items() if not found.missing and found.kind != "constant"]


def _exact(matrix: np.ndarray, query: np.ndarray, scale: float, rng: np.random.Generator) -> tuple[Collision, ...]:
    factors = (1e-3, 0.1, 1.0, 2.0, 7.0, 1e3)
    return (
        multiples_collision(query, matrix, scale=scale, factors=factors, mechanism="relu"),
        elu1_collision(query, matrix, scale=scale, factors=factors),
        affine_collision(matrix, scale=scale, rng=rng),
    )


def _inline(matrix: np.ndarray, scale: float, draws: int, rng: np.random.Generator) -> InlineShown:
    queries = rng.standard_normal((draws, matrix.shape[1]))
    weights = mechanism_weights("inline", queries, matrix, scale=scale)
    errors = [
        float(np.linalg.norm(inline_query(w, matrix, scale) - q) / np.linalg.norm(q))
        for w, q in zip(weights, queries, strict=True)
    ]
    on_relu = dataclasses.replace(resolve("inline"), name="inline on relu", query_map=maps.relu, key_map=maps.relu)
    first = np.abs(rng.standard_normal(matrix.shape[1]))
    first[0] = -1.0
    second = first.copy()
    second[0] = -3.0
    return InlineShown(max(errors), certify(on_relu, np.stack([first, second]), matrix, scale=scale))


def _wide(dim: int, rng: np.random.Generator) -> Mechanism:
    """relu(A x + b) with 2 d units, most of them on."""
    a = torch.as_tensor(rng.standard_normal((1, 1, 2 * dim, dim)) / np.sqrt(dim))
    return resolve("relu_affine").with_parameters(A=a, b=torch.full((1, 1, 2 * dim), 3.0, dtype=torch.float64))


def _sweep_json(sweep: MarginSweep) -> dict[str, Any]:
    return {
        "margin": sweep.margin.tolist(),
        "error": sweep.error.tolist(),
        "predicted": sweep.predicted.tolist(),
        "slope": sweep.slope,
        "off": sweep.off,
    }
