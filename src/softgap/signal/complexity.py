"""Statistical complexity, the planes it spans with entropy, and patterns that never occur."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from jaxtyping import Float

from softgap.inputs import check_count, check_share
from softgap.signal.entropy import check_q, log_where_positive, probabilities, reduce_blocks, renyi, shannon
from softgap.signal.patterns import Options, check_batch, pattern_counts
from softgap.signal.results import ComplexityEntropy, Entropy, MissingPatterns, RenyiComplexity
from softgap.signal.validation import check_order

__all__ = [
    "ComplexityBounds",
    "complexity_bounds",
    "complexity_entropy",
    "missing_fraction",
    "missing_patterns",
    "plane",
    "renyi_complexity",
    "statistical_complexity",
]


def complexity_entropy(x: Any, order: int = 3, delay: int = 1, **options: Unpack[Options]) -> ComplexityEntropy:
    """Normalised permutation entropy H and statistical complexity C of each series.

    C = H J(p, u) / J_max with the Jensen-Shannon divergence J(p, u) = S((p + u) / 2) - S(p) / 2 - S(u) / 2 to equal
    frequencies u, and J_max its value for a single pattern (Rosso et al., Phys. Rev. Lett. 99, 154102 (2007)).
    """
    batch = check_batch(x, order, delay, options)

    def reduce(counts: np.ndarray) -> np.ndarray:
        return np.stack(plane(probabilities(counts)), axis=-1)

    values, *window_arrays = reduce_blocks(batch, batch.counts(), reduce, (2,))
    return ComplexityEntropy(values[..., 0], values[..., 1], *window_arrays)


def statistical_complexity(x: Any, order: int = 3, delay: int = 1, **options: Unpack[Options]) -> Entropy:
    """The complexity of ``complexity_entropy`` alone."""
    result = complexity_entropy(x, order, delay, **options)
    return Entropy(result.complexity, result.windows, result.tie_rate, result.eligible)


def renyi_complexity(
    x: Any, q: Sequence[float], order: int = 3, delay: int = 1, **options: Unpack[Options]
) -> RenyiComplexity:
    """The fingerprint (H_q, C_q) of each series over a grid of ``q``.

    H_q is the normalised Renyi entropy, C_q = H_q D_q / D_q,max with the Jensen-Renyi divergence
    D_q = [log sum p^q m^(1-q) + log sum u^q m^(1-q)] / (2 (q - 1)), m = (p + u) / 2 (Jauregui et al., Physica A 498,
    74 (2018), Eqs. 4 and 5). At q = 1 it is the point of ``complexity_entropy``.
    """
    grid = np.atleast_1d(check_q(q))
    batch = check_batch(x, order, delay, options)
    single = np.zeros((1, batch.patterns))
    single[0, 0] = 1.0

    def reduce(counts: np.ndarray) -> np.ndarray:
        p = probabilities(counts)
        entropy = np.stack([renyi(p, value) for value in grid], axis=-1) / math.log(batch.patterns)
        largest = np.array([_jensen_renyi(single, value)[0] for value in grid])
        divergence = np.stack([_jensen_renyi(p, value) for value in grid], axis=-1)
        return np.stack([entropy, entropy * divergence / largest], axis=-1)

    values, *window_arrays = reduce_blocks(batch, batch.counts(), reduce, (grid.size, 2))
    return RenyiComplexity(grid, values[..., 0], values[..., 1], *window_arrays)


def missing_patterns(
    x: Any, order: int = 3, delay: int = 1, *, alpha: float = 0.01, **options: Unpack[Options]
) -> MissingPatterns:
    """Patterns that never occur in a series, and which of them cannot be missing by chance.

    A missing pattern counts as forbidden where white noise of as many windows N would lack any one of them with
    probability at most ``alpha``: order! (1 - 1 / order!)^floor(N / order) <= alpha, since at least N / order of its
    windows share no values and are independent. A real series has fewer effective windows: read forbidden patterns
    of slow series with care.
    """
    check_share("alpha", alpha, usual=0.01)
    counted = pattern_counts(x, order, delay, **options)
    patterns = counted.counts.shape[-1]
    missing = (counted.counts == 0) & counted.eligible[..., None]
    chance = patterns * (1 - 1 / patterns) ** (counted.windows // order)
    forbidden = missing & (chance <= alpha)[..., None]
    fraction = np.where(counted.eligible, missing.mean(axis=-1), np.nan)
    return MissingPatterns(missing, forbidden, fraction, counted.windows, counted.tie_rate, counted.eligible)


def missing_fraction(x: Any, order: int = 3, delay: int = 1, **options: Unpack[Options]) -> Entropy:
    """The share of patterns that never occur."""
    batch = check_batch(x, order, delay, options)
    return Entropy(*reduce_blocks(batch, batch.counts(), lambda counts: np.asarray((counts == 0).mean(axis=-1))))


@dataclass(frozen=True, eq=False)
class ComplexityBounds:
    """The least and the greatest complexity at each entropy, as two curves with increasing entropy."""

    least_entropy: Float[np.ndarray, " point"]
    least_complexity: Float[np.ndarray, " point"]
    greatest_entropy: Float[np.ndarray, " corner_point"]
    greatest_complexity: Float[np.ndarray, " corner_point"]


def complexity_bounds(order: int = 3, *, points: int = 200, per_piece: int = 8) -> ComplexityBounds:
    """The curves between which every point of the complexity-entropy plane lies.

    Least: one pattern with frequency 1/n to 1, the others equal. Greatest: for each k = 1 .. n - 1, one pattern with
    frequency 0 to 1/(k + 1), k equal ones, the rest missing (Martin, Plastino and Rosso, Physica A 369, 439 (2006)).
    """
    n = math.factorial(check_order(order))
    check_count("points", points, least=2)
    check_count("per_piece", per_piece)
    large = np.linspace(1, 1 / n, points)
    least = _grouped_plane(np.stack([large, (1 - large) / (n - 1)]), np.array([[1.0], [n - 1.0]]), n)
    k = np.arange(1, n)
    small = np.arange(per_piece) / per_piece / (k[:, None] + 1)
    others = np.broadcast_to(k[:, None].astype(float), small.shape)
    groups = np.stack([small.ravel(), ((1 - small) / others).ravel()])
    sizes = np.stack([np.ones(small.size), others.ravel()])
    greatest = _grouped_plane(np.c_[groups, [1 / n, 1 / n]], np.c_[sizes, [1.0, n - 1.0]], n)
    return ComplexityBounds(*least, *greatest)


def plane(p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Normalised entropy and complexity of rows of frequencies."""
    n = p.shape[-1]
    entropy = shannon(p)
    divergence = np.maximum(shannon((p + 1 / n) / 2) - entropy / 2 - math.log(n) / 2, 0)
    normalised = entropy / math.log(n)
    return normalised, normalised * divergence / _largest_divergence(n)


def _grouped_plane(p: np.ndarray, sizes: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The same for frequencies p [group, point] that occur ``sizes`` times each; the other patterns are missing."""

    def entropy_of(values: np.ndarray) -> np.ndarray:
        return np.asarray(-(sizes * values * log_where_positive(values)).sum(axis=0))

    absent = n - sizes.sum(axis=0)
    entropy = entropy_of(p)
    mixed = entropy_of((p + 1 / n) / 2) - absent / (2 * n) * math.log(1 / (2 * n))
    divergence = np.maximum(mixed - entropy / 2 - math.log(n) / 2, 0)
    normalised = entropy / math.log(n)
    return normalised, normalised * divergence / _largest_divergence(n)


def _largest_divergence(n: int) -> float:
    return -((n + 1) / n * math.log(n + 1) + math.log(n) - 2 * math.log(2 * n)) / 2


def _jensen_renyi(p: np.ndarray, q: float) -> np.ndarray:
    n = p.shape[-1]
    middle = (p + 1 / n) / 2
    log_middle = np.log(middle)
    from_p = np.where(p > 0, log_middle - log_where_positive(p), 0.0)
    from_u = log_middle + math.log(n)
    if q == 1:
        return np.asarray(-((p * from_p).sum(axis=-1) + from_u.mean(axis=-1)) / 2)
    first = np.log1p((p * np.expm1((1 - q) * from_p)).sum(axis=-1))
    second = np.log1p(np.expm1((1 - q) * from_u).mean(axis=-1))
    return np.asarray((first + second) / (2 * (q - 1)))
