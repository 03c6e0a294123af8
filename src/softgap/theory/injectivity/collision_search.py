"""A search for two different queries with one attention distribution, for any mechanism, a user's own included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64
from scipy.optimize import least_squares

from softgap.attention import Mechanism, resolve
from softgap.deprecation import DeprecatedAttribute
from softgap.errors import UnsupportedError, ValueInputError
from softgap.theory.injectivity.collisions import EXACT, Collision, certify, mechanism_weights
from softgap.theory.injectivity.inversion import check_keys

__all__ = ["Search", "find_collision", "outside_proposition"]

_STEP = 1e-6
_RADII = (0.5, 1.0, 2.0)
_EVALUATIONS = 40

Vector = Float64[np.ndarray, " dim"]


@dataclass(frozen=True, eq=False)
class Search:
    """What a search for a collision found, and how hard it tried.

    Attributes
    ----------
    collision
        The certificate, or None.
    outside
        Why proposition 2 says nothing about this mechanism, or "" where it does.
    queries, starts, evaluations
        Queries that were tried, minimisations that were started for them, and distributions that were computed.
    closest
        Smallest distance of two distributions that was reached, as the largest difference of a weight over the
        largest weight, for queries at least half the norm of one of them apart.
    """

    mechanism: str
    collision: Collision | None
    outside: str
    queries: int
    starts: int
    evaluations: int
    closest: float

    @property
    def has_collision(self) -> bool:
        """Whether a collision was certified."""
        return self.collision is not None

    found = DeprecatedAttribute("has_collision")

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "mechanism": self.mechanism,
            "found": self.has_collision,
            "outside": self.outside,
            "queries": self.queries,
            "starts": self.starts,
            "evaluations": self.evaluations,
            "closest": self.closest,
            "collision": None if self.collision is None else self.collision.to_json(),
        }


def outside_proposition(mechanism: str | Mechanism, d: int) -> str:
    """Why proposition 2 (phi: R^d -> R^d, weights phi(q).phi(k) over their sum) does not cover a mechanism, or ""."""
    mechanism = resolve(mechanism)
    if mechanism.kind == "scores":
        return "its weights are a function of the scores, not a feature map"
    if mechanism.kind in ("positions", "constant"):
        return "it ignores queries and keys"
    if mechanism.kind in ("window", "hybrid"):
        return "its weights are those of softmax on some of the keys"
    if mechanism.query_free:
        return "it ignores the query"
    if mechanism.normaliser == "centred":
        return "its weights are centred, not divided by their sum"
    features = mechanism.feature_dim(d)
    if features is None:
        return "it has no finite feature map"
    return f"it maps {d} dimensions to {features}" if features > d else ""


def find_collision(
    mechanism: str | Mechanism,
    keys: Any,
    *,
    rng: np.random.Generator,
    scale: float | None = None,
    queries: int = 2,
    starts: int = 8,
    tolerance: float = EXACT,
) -> Search:
    """Look for queries p and q with the same distribution over the keys, |p - q| being 0.5, 1 and 2 times |q|.

    For each random q and radius R the residual W(p) - W(q) is minimised over the sphere p = q + R u / |u| by
    Levenberg-Marquardt. First starts are the two directions that the derivative of W at q sees least, and those along
    q; the others are random. A collision curve through q crosses the sphere, so a search that ends above the tolerance
    from every start is evidence against one, though no proof.

    Parameters
    ----------
    keys
        ``[key, dim]``; the certificate holds for them.
    queries, starts
        Random queries, and starts for each of them and each radius.
    tolerance
        Largest difference of a weight, over the largest weight, up to which two distributions are one.
    """
    matrix, mechanism = check_keys(keys), resolve(mechanism)
    if queries < 1 or starts < 1:
        raise ValueInputError(f"queries and starts must be at least 1, got {queries} and {starts}; raise them")
    if mechanism.kind == "constant":
        raise UnsupportedError(f"mechanism '{mechanism.name}' has no weights: its output is a constant")
    d = matrix.shape[1]
    task = _Task(mechanism, matrix, d**-0.5 if scale is None else scale)
    closest, query_count, start_count = np.inf, 0, 0
    for _ in range(queries):
        q = task.draw(rng)
        query_count += 1
        for radius in _RADII:
            size = radius * float(np.linalg.norm(q))
            for direction in task.directions(q, starts, rng):
                start_count += 1
                p = task.nearest(q, size, direction)
                distance = task.distance(p, q)
                closest = min(closest, distance)
                if distance <= tolerance:
                    collision = certify(mechanism, np.stack([q, p]), matrix, scale=task.scale)
                    return task.search(collision, query_count, start_count, closest)
    return task.search(None, query_count, start_count, closest)


class _Task:
    """One mechanism over one set of keys, with the distributions computed so far counted."""

    def __init__(self, mechanism: Mechanism, keys: Float64[np.ndarray, "key dim"], scale: float) -> None:
        self.mechanism, self.keys, self.scale = mechanism, keys, scale
        self.evaluations = 0

    def search(self, collision: Collision | None, queries: int, starts: int, closest: float) -> Search:
        outside = outside_proposition(self.mechanism, self.keys.shape[1])
        return Search(self.mechanism.label, collision, outside, queries, starts, self.evaluations, closest)

    def weights(self, queries: Float64[np.ndarray, "query dim"]) -> Float64[np.ndarray, "query key"]:
        self.evaluations += len(queries)
        return mechanism_weights(self.mechanism, queries, self.keys, scale=self.scale)

    def draw(self, rng: np.random.Generator) -> Vector:
        """A query of standard normal coordinates that gets a distribution at all: relu maps may switch off."""
        for _ in range(100):
            q = rng.standard_normal((self.keys.shape[1],))
            if np.abs(self.weights(q[None]).sum() - 1) < 1e-6:
                return q
        raise UnsupportedError(
            f"mechanism '{self.mechanism.name}' gave none of 100 random queries a distribution over these keys; "
            "use other keys or another map"
        )

    def directions(self, q: Vector, starts: int, rng: np.random.Generator) -> list[Vector]:
        """Least visible first, then along q, then random ones."""
        moves = self.slopes(q)
        least = np.linalg.svd(moves, full_matrices=True)[2][::-1][:2]
        known = [*(sign * v for v in least for sign in (1.0, -1.0)), q, -q]
        random_directions = rng.standard_normal((max(0, starts - len(known)), len(q)))
        return [*known, *random_directions][:starts]

    def slopes(self, q: Vector) -> Float64[np.ndarray, "key dim"]:
        """Central differences of the distribution at q."""
        step = _STEP * max(1.0, float(np.linalg.norm(q))) * np.eye(len(q))
        moved = self.weights(np.concatenate([q + step, q - step]))
        return np.asarray((moved[: len(q)] - moved[len(q) :]).T / (2 * step[0, 0]))

    def nearest(self, q: Vector, size: float, direction: Vector) -> Vector:
        """The point of the sphere around q whose distribution is, from this start, nearest to that of q."""
        target = self.weights(q[None])[0]
        unit = target.max()

        def at(u: Vector) -> Vector:
            return np.asarray(q + size * u / max(float(np.linalg.norm(u)), 1e-300))

        def residual(u: Vector) -> Float64[np.ndarray, " key"]:
            return np.asarray((self.weights(at(u)[None])[0] - target) / unit)

        def jacobian(u: Vector) -> Float64[np.ndarray, "key dim"]:
            norm = max(float(np.linalg.norm(u)), 1e-300)
            onto_sphere = size / norm * (np.eye(len(u)) - np.outer(u, u) / norm**2)
            return np.asarray(self.slopes(at(u)) @ onto_sphere / unit)

        start = direction / max(float(np.linalg.norm(direction)), 1e-300)
        # A mechanism may give a trial point no distribution; its zero row is then far from the target, as it should be.
        solved = least_squares(
            residual, start, jac=jacobian, method="trf", xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=_EVALUATIONS
        )
        return at(solved.x)

    def distance(self, p: Vector, q: Vector) -> float:
        """Largest difference of a weight, over the largest weight; infinite where p has no distribution."""
        rows = self.weights(np.stack([q, p]))
        if np.abs(rows[1].sum() - 1) > 1e-6:
            return float("inf")
        return float(np.abs(rows[0] - rows[1]).max() / np.abs(rows[0]).max())
