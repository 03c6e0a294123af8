"""Simulated studies with known truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

RNG = np.random.default_rng


def heads(rng: np.random.Generator, samples: int, units: int, common: float = 0.5) -> np.ndarray:
    """Heads [sample, unit] of deviation 1 that resemble each other, some of them skewed."""
    shared = rng.standard_normal((samples, 1))
    own = rng.standard_normal((samples, units))
    own[:, ::3] = rng.exponential(size=own[:, ::3].shape) - 1
    return np.asarray(np.sqrt(common) * shared + np.sqrt(1 - common) * own)


def labels_of(rng: np.random.Generator, samples: int, first: int) -> np.ndarray:
    return np.asarray(rng.permutation(samples) < first)


def planted(
    seed: int, samples: int, units: int, effects: Mapping[int, float], common: float = 0.5
) -> tuple[np.ndarray, np.ndarray]:
    """Heads and labels; the effects, in deviations, are in the first group."""
    rng = RNG(seed)
    x, labels = heads(rng, samples, units, common), labels_of(rng, samples, samples // 2)
    for unit, effect in effects.items():
        x[labels, unit] += effect
    return x, labels


def questions(
    rng: np.random.Generator, clusters: int, size: int, units: int, mixed: bool, share: float = 0.7
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Heads, labels and clusters without any effect: samples of one question resemble each other in both.

    Without ``mixed`` a question has one label; with it, its own chance of the first.
    """
    cluster = np.repeat(np.arange(clusters), size)
    level = rng.standard_normal((clusters, units))
    x = np.sqrt(share) * level[cluster] + np.sqrt(1 - share) * rng.standard_normal((clusters * size, units))
    if mixed:
        labels = rng.random(clusters * size) < rng.beta(0.4, 0.4, clusters)[cluster]
    else:
        labels = labels_of(rng, clusters, clusters // 2)[cluster]
    order = rng.permutation(len(x))
    return x[order], labels[order], cluster[order]


def length_confound(
    seed: int, samples: int, units: int, slope: float = 0.5
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Heads that follow the length and nothing else, labels that depend on it too, and the lengths."""
    rng = RNG(seed)
    length = np.round(np.exp(rng.normal(4.5, 0.4, samples)))
    z = (np.log(length) - 4.5) / 0.4
    labels = rng.random(samples) < 1 / (1 + np.exp(-1.2 * z))
    x = slope * z[:, None] + np.sqrt(1 - slope**2) * heads(rng, samples, units)
    return x, labels, length


def confounded(
    rng: np.random.Generator, samples: int, kind: str, units: int = 30
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray], np.ndarray]:
    """Heads without any effect, labels, confounders by name, and the difficulty; confounders drive heads and labels.

    "two": length drives head 0, difficulty head 1. "three": entropy drives head 2 as well. "skewed": heads 0 and 1
    follow 1 / length and log length, whose distribution is skewed. "noisy copy": head 0 is length plus 5 % noise.
    """
    spread = 0.8 if kind == "skewed" else 0.4
    length = np.round(np.exp(rng.normal(4.5, spread, samples))).clip(2)
    z = (np.log(length) - 4.5) / spread
    x, hard = rng.standard_normal((samples, units)), rng.integers(0, 4, samples)
    confounders, tendency = {"length": length}, 1.2 * z
    if kind in ("two", "three"):
        x[:, 0] += z
        x[:, 1] += hard - 1.5
        tendency = tendency + 0.8 * (hard - 1.5)
    else:
        hard = np.zeros(samples, np.int64)
    if kind == "three":
        confounders["entropy"] = rng.standard_normal(samples)
        x[:, 2] += confounders["entropy"]
        tendency = tendency + confounders["entropy"]
    if kind == "skewed":
        x[:, 0] = 1 / length / np.std(1 / length) + 0.3 * x[:, 0]
        x[:, 1] = z + 0.3 * x[:, 1]
    if kind == "noisy copy":
        x[:, 0] = length / np.std(length) + 0.05 * x[:, 0]
    return x, rng.random(samples) < 1 / (1 + np.exp(-tendency)), confounders, hard


def randomised(p: Sequence[float], permutations: int, rng: np.random.Generator) -> np.ndarray:
    """p-values spread over their steps: exactly uniform under the null if (k + 1) / (n + 1) is."""
    return np.asarray(p) - rng.random(len(p)) / (permutations + 1)
