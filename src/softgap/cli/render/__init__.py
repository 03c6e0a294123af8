"""What commands show: runs, findings and labs, on a terminal or as JSON."""

from __future__ import annotations

__all__ = []
