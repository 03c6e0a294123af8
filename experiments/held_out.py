"""Texts for experiments: two halves that share no article, and sequences spread over one of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np


def halves(text: str) -> tuple[str, str]:
    """The text cut at the first title line (WikiText) or paragraph behind its middle."""
    middle = len(text) // 2
    title = re.search(r"\n = [^=].* = \n|\n\n", text[middle:])
    cut = middle + (title.start() if title else 0)
    return text[:cut], text[cut:]


def sequences(ids: Sequence[int], counts: dict[int, int]) -> dict[int, list[list[int]]]:
    """So many sequences of each length, evenly spread over the tokens."""
    return {
        length: [list(ids[s : s + length]) for s in np.linspace(0, len(ids) - length, count).astype(int)]
        for length, count in counts.items()
    }
