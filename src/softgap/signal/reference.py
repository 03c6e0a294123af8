"""Reference implementations of the ordinal measures and of IAAFT, in plain Python."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

__all__ = [
    "iaaft_loop",
    "reference_complexity",
    "reference_counts",
    "reference_entropy",
    "reference_irreversibility",
    "reference_patterns",
    "reference_renyi",
    "reference_renyi_complexity",
    "reference_transitions",
    "reference_weights",
]


Ranks = tuple[int, ...]


def reference_patterns(x: Sequence[float], order: int, delay: int, ties: str = "exclude") -> list[Ranks | None]:
    """The rank permutation of every window; None where it is excluded."""
    patterns: list[Ranks | None] = []
    for t in range(len(x) - (order - 1) * delay):
        window = [x[t + i * delay] for i in range(order)]
        if ties == "exclude" and len(set(window)) < order:
            patterns.append(None)
            continue
        by_value = sorted(range(order), key=lambda i: window[i])
        patterns.append(tuple(by_value.index(i) for i in range(order)))
    return patterns


def reference_counts(x: Sequence[float], order: int, delay: int, ties: str = "exclude") -> list[int]:
    """How often each rank permutation occurs, in lexicographic order."""
    counts = Counter(reference_patterns(x, order, delay, ties))
    return [counts[ranks] for ranks in itertools.permutations(range(order))]


def reference_weights(x: Sequence[float], order: int, delay: int, ties: str = "exclude") -> list[float]:
    """The summed variance of the windows of each pattern."""
    weights = dict.fromkeys(itertools.permutations(range(order)), 0.0)
    for t, ranks in enumerate(reference_patterns(x, order, delay, ties)):
        if ranks is not None:
            window = [float(x[t + i * delay]) for i in range(order)]
            mean = math.fsum(window) / order
            weights[ranks] += math.fsum((value - mean) ** 2 for value in window) / order
    return list(weights.values())


def reference_entropy(counts: Sequence[float]) -> float:
    """Shannon entropy in nats of counts or weights."""
    total = math.fsum(counts)
    return -math.fsum(c / total * math.log(c / total) for c in counts if c > 0)


def reference_renyi(counts: Sequence[float], q: float) -> float:
    """Renyi entropy in nats."""
    total = math.fsum(counts)
    return math.log(math.fsum((c / total) ** q for c in counts if c > 0)) / (1 - q)


def reference_complexity(counts: Sequence[float]) -> float:
    """Jensen-Shannon statistical complexity."""
    n, total = len(counts), math.fsum(counts)
    single = [1.0] + [0.0] * (n - 1)

    def divergence(p: Sequence[float]) -> float:
        middle = [(value + 1 / n) / 2 for value in p]
        return reference_entropy(middle) - reference_entropy(p) / 2 - math.log(n) / 2

    p = [c / total for c in counts]
    return reference_entropy(p) / math.log(n) * divergence(p) / divergence(single)


def reference_renyi_complexity(counts: Sequence[float], q: float) -> float:
    """Jensen-Renyi statistical complexity, q other than 1."""
    n, total = len(counts), math.fsum(counts)
    single = [1.0] + [0.0] * (n - 1)

    def divergence(p: Sequence[float]) -> float:
        middle = [(value + 1 / n) / 2 for value in p]
        first = math.fsum(a**q * m ** (1 - q) for a, m in zip(p, middle, strict=True) if a > 0)
        second = math.fsum((1 / n) ** q * m ** (1 - q) for m in middle)
        return (math.log(first) + math.log(second)) / (2 * (q - 1))

    p = [c / total for c in counts]
    return reference_renyi(p, q) / math.log(n) * divergence(p) / divergence(single)


def reference_transitions(x: Sequence[float], order: int, delay: int, ties: str = "exclude") -> tuple[float, float]:
    """Link entropy and global node entropy of the ordinal network, in nats."""
    steps = itertools.pairwise(reference_patterns(x, order, delay, ties))
    links = Counter((a, b) for a, b in steps if a is not None and b is not None)
    leaving: Counter[Ranks] = Counter()
    for (a, _), count in links.items():
        leaving[a] += count
    node = 0.0
    for a, total in leaving.items():
        node += total / leaving.total() * reference_entropy([c for link, c in links.items() if link[0] == a])
    return reference_entropy(list(links.values())), node


def reference_irreversibility(counts: Sequence[float], order: int) -> float:
    """Jensen-Shannon divergence between the patterns and the same read backwards, over log 2."""
    total = math.fsum(counts)
    share = dict(zip(itertools.permutations(range(order)), (c / total for c in counts), strict=True))
    middle = [(p + share[ranks[::-1]]) / 2 for ranks, p in share.items()]
    return (reference_entropy(middle) - reference_entropy(list(share.values()))) / math.log(2)


def iaaft_loop(
    x: Float64[np.ndarray, " time"], start: Float64[np.ndarray, " time"], max_iterations: int
) -> tuple[Float64[np.ndarray, " time"], int]:
    """The surrogate that the iteration reaches from ``start``, a permutation of ``x``, and the iterations made.

    Schreiber and Schmitz 1996, PRL 77, 635: ``S -> |X| S / |S|``, back to time, values of x by rank, until nothing
    changes.
    """
    ordered = np.sort(x)
    amplitude = np.abs(np.fft.rfft(x))
    series = start.copy()
    for iteration in range(1, max_iterations + 1):
        spectrum = np.fft.rfft(series)
        shaped = np.fft.irfft(amplitude * np.exp(1j * np.angle(spectrum)), n=len(x))
        following = np.empty_like(series)
        following[np.argsort(shaped, kind="stable")] = ordered
        if np.array_equal(following, series):
            return series, iteration
        series = following
    return series, max_iterations
