"""Reference implementations: one unit and one permutation at a time, by the definitions, in plain Python.

Shares nothing with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

__all__ = [
    "reference_auroc",
    "reference_coefficient",
    "reference_delong",
    "reference_kappa",
    "reference_maximum",
    "reference_p_values",
    "reference_permutations",
]


def reference_coefficient(x: Sequence[float], labels: Sequence[bool], blocks: Sequence[int]) -> tuple[float, float]:
    """Coefficient of the label with one intercept per block by least squares, and its HC2 standard error."""
    names = sorted(set(blocks))
    members = {b: [i for i, block in enumerate(blocks) if block == b] for b in names}

    def centred(values: Sequence[float]) -> list[float]:
        out = [0.0] * len(values)
        for rows in members.values():
            mean = math.fsum(values[i] for i in rows) / len(rows)
            for i in rows:
                out[i] = values[i] - mean
        return out

    y, z = centred([float(label) for label in labels]), centred(x)
    total = math.fsum(value * value for value in y)
    beta = math.fsum(a * b for a, b in zip(y, z, strict=True)) / total
    variance = 0.0
    for b, rows in members.items():
        for i in rows:
            leverage = 1 / len(members[b]) + y[i] ** 2 / total
            if y[i] != 0:
                variance += (y[i] * (z[i] - beta * y[i])) ** 2 / (1 - leverage)
    return beta, math.sqrt(variance) / total


def reference_permutations(labels: Sequence[bool], blocks: Sequence[int]) -> list[tuple[bool, ...]]:
    """Every way to exchange labels within blocks, the given one among them."""
    names = sorted(set(blocks))
    members = [[i for i, block in enumerate(blocks) if block == b] for b in names]
    choices = [list(itertools.combinations(rows, sum(bool(labels[i]) for i in rows))) for rows in members]
    arrangements = []
    for combination in itertools.product(*choices):
        first = set(itertools.chain.from_iterable(combination))
        arrangements.append(tuple(i in first for i in range(len(labels))))
    return arrangements


def reference_maximum(
    table: Sequence[Sequence[float]], labels: Sequence[bool], blocks: Sequence[int]
) -> tuple[list[float], float]:
    """t of every unit (a column of the table), and the largest |t|."""
    t = []
    for unit in range(len(table[0])):
        beta, error = reference_coefficient([row[unit] for row in table], labels, blocks)
        t.append(beta / error)
    return t, max(abs(value) for value in t)


def reference_p_values(
    table: Sequence[Sequence[float]], labels: Sequence[bool], blocks: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Exact p and max-T p of every unit, over all permutations."""
    observed, _ = reference_maximum(table, labels, blocks)
    every = [reference_maximum(table, permuted, blocks) for permuted in reference_permutations(labels, blocks)]
    n = len(every)
    slack = 1 - 1e-9
    alone = [sum(abs(t[u]) >= abs(value) * slack for t, _ in every) / n for u, value in enumerate(observed)]
    adjusted = [sum(largest >= abs(value) * slack for _, largest in every) / n for value in observed]
    return alone, adjusted


def reference_auroc(a: Sequence[float], b: Sequence[float]) -> float:
    """Share of pairs in which a is larger, ties half."""
    return math.fsum((x > y) + (x == y) / 2 for x in a for y in b) / (len(a) * len(b))


def reference_delong(a: Sequence[float], b: Sequence[float]) -> float:
    """DeLong's standard error of the AUROC."""
    area = reference_auroc(a, b)
    first = [reference_auroc([x], b) for x in a]
    second = [reference_auroc(a, [y]) for y in b]
    parts = [math.fsum((v - area) ** 2 for v in values) / (len(values) - 1) / len(values) for values in (first, second)]
    return math.sqrt(math.fsum(parts))


def reference_kappa(first: Sequence[object], other: Sequence[object]) -> float:
    """Cohen's kappa."""
    n = len(first)
    agreement = sum(a == b for a, b in zip(first, other, strict=True)) / n
    chance = sum(sum(a == c for a in first) / n * sum(b == c for b in other) / n for c in {*first, *other})
    return (agreement - chance) / (1 - chance)
