"""How a result shows itself in a notebook: as HTML where the report can make it, else as plain text."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["Displayed"]


class Displayed:
    """A result that a notebook shows as a page in a frame of its own."""

    def _repr_html_(self) -> str | None:
        # The report lies below this layer, so it is asked for by name, as a user would: softgap.report.
        package: Any = sys.modules["softgap"]
        shown: str | None = package.report.notebook_html(self)
        return shown

    def __repr__(self) -> str:
        # Of a lab: what it says, not the arrays behind it.
        claims = getattr(self, "claims", ())
        return f"<{type(self).__name__}: {'; '.join(f'{claim.name}: {claim.verdict}' for claim in claims)}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))
