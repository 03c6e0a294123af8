"""What a lab says about a claim of its sources: a verdict, the condition it hangs on, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = ["Claim", "Verdict"]

Verdict = Literal["holds", "holds only when", "does not hold", "not decided"]


@dataclass(frozen=True)
class Claim:
    """One claim, as the lab found it.

    Attributes
    ----------
    name
        A word or two, stable from version to version.
    source
        Who says so: a paper with its equation, or "softgap" for what the lab adds.
    statement
        The claim in one sentence.
    verdict
        Decided by the numbers of this very run, never written down beforehand.
    condition
        For "holds only when": when. For "not decided": what is missing. Otherwise a remark, or nothing.
    numbers
        What the verdict was read from.
    """

    name: str
    source: str
    statement: str
    verdict: Verdict
    condition: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
