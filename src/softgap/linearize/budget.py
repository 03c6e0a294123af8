"""What a set of swapped heads may cost: a rise in loss, and a drop in recall where that is limited too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from softgap.errors import ValueInputError

__all__ = ["Budget"]


@dataclass(frozen=True)
class Budget:
    """Both limits hold together.

    Attributes
    ----------
    loss
        Largest rise in loss, in nats per token.
    recall
        Largest drop in recall, between 0 and 1; None does not limit it.
    """

    loss: float
    recall: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.loss < math.inf:
            raise ValueInputError(
                f"the budget must be above 0 nats per token and finite, got {self.loss:g}; 0.1 is usual"
            )
        if self.recall is not None and not 0 <= self.recall <= 1:
            raise ValueInputError(
                f"the recall budget must be between 0 and 1, the largest drop, got {self.recall:g}; 0.05 is usual"
            )

    def allows(self, change: Mapping[str, float]) -> bool:
        """Whether changes in ``loss`` and ``recall`` stay within it."""
        return not self._exceeded(change)

    def refusal(self, change: Mapping[str, float], cheapest: str) -> ValueInputError:
        """Which limits not even the cheapest set meets, in one sentence."""
        names, costs = zip(*self._exceeded(change), strict=True)
        return ValueInputError(
            f"nothing meets the {' nor the '.join(names)}: {cheapest} {' and '.join(costs)} already; allow more, or "
            "give more text"
        )

    def _exceeded(self, change: Mapping[str, float]) -> list[tuple[str, str]]:
        """Each limit that is not met, and by what."""
        found = []
        if not change["loss"] <= self.loss:
            found.append((f"budget of {self.loss:g} nats per token", f"costs {change['loss']:.3g}"))
        if self.recall is not None:
            if "recall" not in change:
                raise ValueInputError(
                    f"a recall budget needs lookups, and none were asked (recall budget {self.recall:g}); ask some, "
                    "or leave the recall budget out"
                )
            if not -change["recall"] <= self.recall:
                found.append((f"recall budget of {self.recall:g}", f"loses {-change['recall']:.3g} of recall"))
        return found
