"""The verdicts of the injectivity lab on synthetic keys, each read from what the run measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from softgap.theory.claims import Claim, Verdict
from softgap.theory.injectivity.collisions import EXACT, Collision

if TYPE_CHECKING:
    from softgap.theory.injectivity.collision_search import Search
    from softgap.theory.injectivity.synthetic import Injectivity

__all__ = ["synthetic_claims"]

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
        *(_constructed(collision) for collision in lab.exact),
        _proposition(lab.searches),
        _wide(lab.wide),
        _inline(lab),
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


def _constructed(collision: Collision) -> Claim:
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
    found = [search for search in inside if search.collision is not None]
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
            "found": len(found),
            "largest_distance": max((s.collision.distance for s in found if s.collision is not None), default=np.nan),
        },
    )


def _wide(search: Search) -> Claim:
    return Claim(
        name="more units than dimensions",
        source="softgap",
        statement="relu(A x + b) with twice as many units as dimensions still has collisions.",
        verdict="holds" if search.found else "not decided",
        condition="" if search.found else f"none found; {_effort(search)}",
        numbers={"starts": search.starts, "closest": search.closest},
    )


def _inline(lab: Injectivity) -> Claim:
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
    found = sorted(search.mechanism for search in outside if search.found)
    none = sorted(search.mechanism for search in outside if not search.found)
    verdict: Verdict = "not decided"
    condition = "no mechanism outside proposition 2 was looked at"
    if outside:
        verdict = "does not hold" if none and not found else "holds" if found and not none else "holds only when"
        condition = (
            f"the mechanism is one of: {', '.join(found) or 'none'}; none was found for {', '.join(none) or 'none'}"
        )
    return Claim(
        name="outside the proposition",
        source="softgap",
        statement="Mechanisms outside proposition 2 (more features than dimensions, scores, positions) collide too.",
        verdict=verdict,
        condition=condition,
        numbers={
            "mechanisms": len(outside),
            "collisions": len(found),
            "closest_of_the_others": min((s.closest for s in outside if not s.found), default=np.nan),
        },
    )


def _effort(search: Search) -> str:
    return (
        f"{search.starts} starts from {search.queries} queries, {search.evaluations} distributions, "
        f"closest {search.closest:.2g} of the largest weight"
    )
