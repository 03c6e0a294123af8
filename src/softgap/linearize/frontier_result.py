"""What a frontier found: points of swapped heads with their costs, and the largest that a budget allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from softgap.errors import ValueInputError
from softgap.linearize.budget import Budget
from softgap.linearize.resampling import Interval

__all__ = ["Frontier", "Point"]


@dataclass(frozen=True)
class Point:
    """One set of swapped heads.

    Attributes
    ----------
    order
        How they were chosen.
    mechanism
        What they became.
    units, heads
        How many went.
    share
        Of all heads or groups.
    change
        Rise in ``loss``, change in ``accuracy`` and in ``recall``.
    """

    order: str
    mechanism: str
    units: int
    heads: int
    share: float
    change: Mapping[str, Interval]


@dataclass(frozen=True, eq=False)
class Frontier:
    """All points, by units of heads or of groups; ``original`` is the unswapped model."""

    by: str
    original: Mapping[str, float]
    points: tuple[Point, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        points = [asdict(point) for point in self.points]
        return {"by": self.by, "original": dict(self.original), "points": points, "settings": dict(self.settings)}

    def curve(self, order: str, mechanism: str | None = None) -> list[Point]:
        """The points of one order, fewest swapped first."""
        return self._points(order, mechanism)

    def largest(
        self,
        budget: float,
        recall_budget: float | None = None,
        *,
        order: str | None = None,
        mechanism: str | None = None,
    ) -> Point:
        """The point with most units whose rise in loss, and drop in recall where that is limited, are allowed.

        Parameters
        ----------
        budget, recall_budget
            Largest rise in loss, in nats per token, and largest drop in recall; None does not limit it.
        order, mechanism
            Only points of these; None for all. Of equally large points the cheapest in loss is chosen.
        """
        limits = Budget(budget, recall_budget)
        points = self._points(order, mechanism)
        if not points:
            known = sorted({f"{point.order}: {point.mechanism}" for point in self.points})
            raise ValueInputError(f"this frontier has {', '.join(known)}, got {order or 'any'}: {mechanism or 'any'}")
        allowed = [point for point in points if limits.allows(_values(point))]
        if not allowed:
            raise limits.refusal(_values(points[0]), f"the smallest set ({points[0].units} {self.by})")
        return max(allowed, key=lambda point: (point.units, -point.change["loss"].value))

    def _points(self, order: str | None, mechanism: str | None) -> list[Point]:
        """Those of an order and a mechanism, fewest units first and then the cheapest."""
        chosen = [p for p in self.points if order in (None, p.order) and mechanism in (None, p.mechanism)]
        return sorted(chosen, key=lambda point: (point.share, point.change["loss"].value))


def _values(point: Point) -> dict[str, float]:
    return {name: interval.value for name, interval in point.change.items()}
