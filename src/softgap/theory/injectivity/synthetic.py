"""The injectivity lab on synthetic keys, and the verdicts (Han et al. 2024)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from softgap.attention import Mechanism, mechanisms, resolve
from softgap.attention import feature_maps as maps
from softgap.errors import ValueInputError
from softgap.inputs import as_items
from softgap.progress import Progress, silent
from softgap.theory.injectivity.collision_search import Search, find_collision
from softgap.theory.injectivity.collisions import (
    EXACT,
    Collision,
    MarginSweep,
    Prefix,
    affine_collision,
    certify,
    elu1_collision,
    flat_keys,
    log_margin_sweep,
    mechanism_weights,
    multiples_collision,
    prefixes,
    softmax_collision,
    weight_margin_sweep,
)
from softgap.theory.injectivity.inversion import KeyCondition, inline_query, key_condition
from softgap.theory.lab import Claim, Verdict
from softgap.trajectories.run import Displayed

__all__ = ["Injectivity", "injectivity_lab"]


_SAD = "navi-SAD, capacity gap"


_HAN = "Han et al. 2024"


# A query counts as recovered below this relative error; rounding through a margin of 1e-6 stays under it.
_RECOVERED = 1e-6


def synthetic_claims(lab: Injectivity) -> tuple[Claim, ...]:
    """One claim after the other."""
    return (
        _softmax(lab),
        _gloss(lab),
        _inverter(lab),
        *(_construction_claim(collision) for collision in lab.exact),
        _proposition(lab.searches),
        _wide_claim(lab.wide),
        _inline_claim(lab),
        _outside(lab.searches),
    )


def _softmax(lab: Injectivity) -> Claim:
    dim = int(lab.settings["dim"])
    few = [prefix for prefix in lab.prefixes if prefix.keys <= dim]
    many = [prefix for prefix in lab.prefixes if prefix.keys > dim]
    inverts = all(prefix.injective == 1 and prefix.error <= _RECOVERED for prefix in many)
    collides = all(prefix.injective == 0 and prefix.collision <= EXACT for prefix in few)
    verdict: Verdict = "does not hold"
    if inverts:
        verdict = "holds only when" if collides else "not decided"
    return Claim(
        name="softmax injective",
        source=f"{_HAN}, proposition 1; {_SAD}",
        statement="Softmax attention gives different queries different distributions.",
        verdict=verdict,
        condition=f"at least d + 1 = {dim + 1} keys affinely span the space; on fewer it collides too"
        if inverts
        else "",
        numbers={
            "dim": dim,
            "largest_error_above_d_keys": max(prefix.error for prefix in many),
            "largest_collision_distance_to_d_keys": max(prefix.collision for prefix in few),
        },
    )


def _gloss(lab: Injectivity) -> Claim:
    distinct = lab.flat_collision.exact and not lab.flat.injective
    return Claim(
        name="translations",
        source=_SAD,
        statement="rank [K, 1] = d + 1 says that the keys are not all translations of each other.",
        verdict="does not hold" if distinct else "not decided",
        condition="keys on a hyperplane, no two alike and of rank d, collide; the condition is that keys affinely span",
        numbers={
            "keys": lab.flat.keys,
            "rank": lab.flat.rank,
            "needed": lab.flat.dim + 1,
            "collision_distance": lab.flat_collision.distance,
        },
    )


def _inverter(lab: Injectivity) -> Claim:
    follows = abs(lab.log_sweep.slope + 1) < 0.05 and lab.log_sweep.off < 1.1 and lab.weight_sweep.off < 1.1
    return Claim(
        name="inverter",
        source="softgap",
        statement="The error of a query recovered from its weights is the error of the weights over the margin.",
        verdict="holds" if follows else "does not hold",
        condition="a sharp distribution has a tiny weight margin: injective need not mean distinguishable",
        numbers={
            "slope_log_margin": lab.log_sweep.slope,
            "off_log_margin": lab.log_sweep.off,
            "off_weight_margin": lab.weight_sweep.off,
            "smallest_weight_margin": float(lab.weight_sweep.margin.min()),
        },
    )


def _construction_claim(collision: Collision) -> Claim:
    formula = {
        "relu": "all positive multiples of a query",
        "elu1": "phi^-1(c phi(q)) for every c > 0",
        "relu_affine": "queries of different directions and lengths",
    }[collision.mechanism]
    lengths = np.linalg.norm(collision.queries, axis=1)
    return Claim(
        name=f"collision of {collision.mechanism}",
        source=f"{_HAN}, proposition 2",
        statement=f"Under {collision.mechanism}, {formula} have one distribution.",
        verdict="holds" if collision.exact and collision.apart > 1e-3 else "does not hold",
        numbers={
            "queries": len(collision.queries),
            "distance": collision.distance,
            "least_angle": collision.angle,
            "longest_over_shortest": float(lengths.max() / lengths.min()),
        },
    )


def _proposition(searches: Sequence[Search]) -> Claim:
    inside = [search for search in searches if not search.outside]
    collisions = [search for search in inside if search.collision is not None]
    verdict: Verdict = "not decided"
    missed = ", ".join(search.mechanism for search in inside if search.collision is None)
    if inside and not missed:
        verdict = "holds"
    return Claim(
        name="linear not injective",
        source=f"{_HAN}, proposition 2",
        statement="Linear attention with phi from R^d to R^d gives some different queries one distribution.",
        verdict=verdict,
        condition=f"no collision was found for {missed}" if missed else "" if inside else "no such map was looked at",
        numbers={
            "maps": len(inside),
            "found": len(collisions),
            "largest_distance": max(
                (s.collision.distance for s in collisions if s.collision is not None), default=np.nan
            ),
        },
    )


def _wide_claim(search: Search) -> Claim:
    return Claim(
        name="more units than dimensions",
        source="softgap",
        statement="relu(A x + b) with twice as many units as dimensions still has collisions.",
        verdict="holds" if search.has_collision else "not decided",
        condition="" if search.has_collision else f"none found; {_effort(search)}",
        numbers={"starts": search.starts, "closest": search.closest},
    )


def _inline_claim(lab: Injectivity) -> Claim:
    inverts, relu = lab.inline.error <= _RECOVERED, lab.inline.relu
    verdict: Verdict = "does not hold"
    if inverts:
        verdict = "holds only when" if relu.exact and relu.apart > 1e-3 else "holds"
    return Claim(
        name="inline injective",
        source=_HAN,
        statement="InLine attention is injective.",
        verdict=verdict,
        condition="phi is injective and rank [phi(K), 1] is full; on relu features it collides" if inverts else "",
        numbers={"largest_error": lab.inline.error, "relu_distance": relu.distance, "relu_apart": relu.apart},
    )


def _outside(searches: Sequence[Search]) -> Claim:
    outside = [search for search in searches if search.outside]
    colliding = sorted(search.mechanism for search in outside if search.has_collision)
    without = sorted(search.mechanism for search in outside if not search.has_collision)
    verdict: Verdict = "not decided"
    condition = "no mechanism outside proposition 2 was looked at"
    if outside:
        verdict = "holds only when" if (not colliding) == (not without) else "holds" if colliding else "does not hold"
        condition = (
            f"the mechanism is one of: {', '.join(colliding) or 'none'}; "
            f"none was found for {', '.join(without) or 'none'}"
        )
    return Claim(
        name="outside the proposition",
        source="softgap",
        statement="Mechanisms outside proposition 2 (more features than dimensions, scores, positions) collide too.",
        verdict=verdict,
        condition=condition,
        numbers={
            "mechanisms": len(outside),
            "collisions": len(colliding),
            "closest_of_the_others": min((s.closest for s in outside if not s.has_collision), default=np.nan),
        },
    )


def _effort(search: Search) -> str:
    return (
        f"{search.starts} starts from {search.queries} queries, {search.evaluations} distributions, "
        f"closest {search.closest:.2g} of the largest weight"
    )


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
    rng
        The generator of keys and queries.
    dim, keys
        Size of a query, and number of keys where the rank condition should hold; more keys than ``dim``.
    draws
        Random keys per prefix length, and random queries for InLine.
    starts, queries
        Effort of the collision finder, see ``find_collision``.
    mechanisms
        What the finder looks at; every registered mechanism that has weights and needs no parameters by default.
    progress
        Called with the stage in words and the share of it that is done.

    Returns
    -------
    Injectivity
        A verdict for each claim, and the measurements behind it.

    Examples
    --------
    >>> import numpy as np
    >>> from softgap.theory import injectivity_lab
    >>> lab = injectivity_lab(
    ...     rng=np.random.default_rng(0), dim=4, keys=12, draws=4, starts=2, queries=1, mechanisms=["elu1"]
    ... )
    >>> {claim.name: claim.verdict for claim in lab.claims}["collision of elu1"]
    'holds'
    """
    selection = _resolve_mechanisms(dim, keys, draws, mechanisms)
    tell = progress or silent
    scale = dim**-0.5
    tell("margins", 0.0)
    lengths = sorted({2, *range(max(2, dim - 3), dim + 5), 2 * dim, keys})
    matrix, query = rng.standard_normal((keys, dim)), rng.standard_normal(dim)
    flat = flat_keys(dim, keys, rng)
    searches = []
    for i, mechanism in enumerate(selection):
        tell(f"looking for collisions of {mechanism.label}", (1 + i) / (2 + len(selection)))
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
            "mechanisms": [mechanism.label for mechanism in selection],
        },
    )


def _resolve_mechanisms(dim: int, keys: int, draws: int, names: Sequence[str | Mechanism] | None) -> list[Mechanism]:
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
    selection = [resolve(name) for name in (searchable() if names is None else as_items(names))]
    for mechanism in selection:
        # Says what is missing, before any work is done.
        mechanism.site(torch.arange(1), torch.float64)
    return selection


def searchable() -> list[str]:
    """Registered mechanisms that have weights and wait for no parameters."""
    return [name for name, mechanism in mechanisms().items() if not mechanism.missing and mechanism.kind != "constant"]


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
