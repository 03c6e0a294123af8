"""What makes the difference: the normaliser taken out, the threshold tuned, and a linear classifier on the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from softgap.attention import resolve
from softgap.errors import ValueInputError
from softgap.inputs import as_items
from softgap.theory.separation.classes import Construction, Draw, dense_outputs, draw_many
from softgap.theory.separation.network import Share, fire, plain_fields, share

__all__ = ["Ablation", "Probe", "normaliser_ablation", "probe_outputs"]

# Ridge, relative to the mean squared norm of the centred outputs: only there to make the solution unique.
_RIDGE = 1e-9


@dataclass(frozen=True)
class Ablation:
    """One of the four networks normaliser on or off x exp or linear.

    Attributes
    ----------
    fires_d0, fires_d1
        P(F > 0) at the source's threshold.
    tuned
        P(D0 below and D1 above the threshold), the threshold chosen on the other half of the draws: whether *any*
        threshold tells the classes apart, since without a normaliser C has another scale.
    """

    weights: str
    normalised: bool
    fires_d0: Share
    fires_d1: Share
    tuned: Share

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return plain_fields(self)


@dataclass(frozen=True)
class Probe:
    """A linear classifier on C, all n x d entries, fitted to half of the samples and tested on the other.

    Attributes
    ----------
    accuracy, pooled
        On the test half, from all entries and from the mean of the n rows. The marked row is another in every sample,
        so a classifier on all entries must find something in every row; the mean needs it in one.
    noise
        Standard deviation of the Gaussian noise on every entry of C, in L.
    marked_d0, marked_d1
        Column 1 of the marked row of C in each class, in L, without noise: where the classes differ most.
    distance
        |mean C of D1 - mean C of D0| in L, without noise.
    """

    mechanism: str
    noise: float
    accuracy: Share
    pooled: Share
    marked_d0: float
    marked_d1: float
    distance: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return plain_fields(self)


def normaliser_ablation(construction: Construction, draws: int, *, rng: np.random.Generator) -> tuple[Ablation, ...]:
    """The networks with u = exp(A A^T) or A A^T, C = u A or C = diag(u 1)^-1 u A."""
    if not construction.regular or draws < 4:
        raise ValueInputError(
            f"the ablation needs n = (d - 2) t and at least 4 draws, got n = {construction.n}, d = {construction.d}, "
            f"t = {construction.t} and {draws} draws"
        )
    drawn = draw_many(construction, draws, rng=rng)
    return tuple(
        _ablate(construction, drawn, name, normalised)
        for name in ("softmax", "identity")
        for normalised in (True, False)
    )


def _ablate(construction: Construction, drawn: Sequence[Draw], name: str, normalised: bool) -> Ablation:
    low, high = (
        fire(resolve(name), construction, label, drawn, form="classes", normalised=normalised) for label in (0, 1)
    )
    half = len(drawn) // 2
    threshold = best_threshold(low.largest[:half], high.largest[:half])
    right = (low.largest[half:] <= threshold) & (high.largest[half:] > threshold)
    return Ablation(
        "exp" if name == "softmax" else "linear",
        normalised,
        share(int((low.value > 0).sum()), len(drawn)),
        share(int((high.value > 0).sum()), len(drawn)),
        share(int(right.sum()), len(right)),
    )


def best_threshold(low: Float[np.ndarray, " draw"], high: Float[np.ndarray, " draw"]) -> float:
    """The threshold under most of ``high`` and over most of ``low``: midway between two values, the first best."""
    values = np.unique(np.concatenate([low, high]))
    candidates = np.concatenate([[values[0] - 1], (values[1:] + values[:-1]) / 2, [values[-1] + 1]])
    right = [(low <= threshold).sum() + (high > threshold).sum() for threshold in candidates]
    return float(candidates[int(np.argmax(right))])


def probe_outputs(
    names: Sequence[str],
    construction: Construction,
    samples: int,
    *,
    rng: np.random.Generator,
    noises: Sequence[float] = (0.0, 0.001, 0.01, 0.1),
) -> tuple[Probe, ...]:
    """Fit a linear classifier to the attention output C of D0 and D1 samples with random marked rows."""
    if samples < 8:
        raise ValueInputError(f"a linear probe needs at least 8 samples of each class, got {samples}")
    drawn = draw_many(construction, samples, rng=rng)
    noise = rng.standard_normal((2, samples, construction.n * construction.d))
    probes = []
    for name in as_items(names):
        mechanism, unit = resolve(name), construction.unit
        outputs = np.stack(
            [[dense_outputs(mechanism, construction, label, draw) / unit for draw in drawn] for label in (0, 1)]
        )
        marked = [np.mean([outputs[label, i, draw.row, 0] for i, draw in enumerate(drawn)]) for label in (0, 1)]
        distance = float(np.linalg.norm(outputs[1].mean(0) - outputs[0].mean(0)))
        flat = outputs.reshape(2, samples, -1)
        for level in noises:
            noisy = flat + level * noise
            pooled = noisy.reshape(outputs.shape).mean(2)
            shares = _held_out(noisy), _held_out(pooled)
            probes.append(Probe(name, level, *shares, float(marked[0]), float(marked[1]), distance))
    return tuple(probes)


def _held_out(flat: Float[np.ndarray, "2 sample entry"]) -> Share:
    """Accuracy of ridge regression to -1 and +1, in its dual form: there are far more entries than samples."""
    half = flat.shape[1] // 2
    train = flat[:, :half].reshape(2 * half, -1)
    target = np.repeat([-1.0, 1.0], half)
    centre = train.mean(0)
    train = train - centre
    gram = train @ train.T
    ridge = _RIDGE * float(np.trace(gram)) / len(gram) or 1.0  # outputs that never differ leave nothing to fit
    dual = np.linalg.solve(gram + ridge * np.eye(len(gram)), target)
    weights = dual @ train
    right = sum(int((((flat[label, half:] - centre) @ weights > 0) == bool(label)).sum()) for label in (0, 1))
    return share(right, 2 * (flat.shape[1] - half))
