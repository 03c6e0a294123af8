"""Texts for experiments: two halves that share no article, and sequences spread over one of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from softgap.models.tokens import stream_of


def halves(text: str) -> tuple[str, str]:
    """The text cut at the first title line (WikiText) or paragraph behind its middle."""
    middle = len(text) // 2
    title = re.search(r"\n = [^=].* = \n|\n\n", text[middle:])
    cut = middle + (title.start() if title else 0)
    return text[:cut], text[cut:]


def sequences(ids: Sequence[int], counts: dict[int, int]) -> dict[int, list[list[int]]]:
    """So many sequences of each length, evenly spread over the tokens, behind the first tokens that they have."""
    stream = stream_of(ids)
    return {
        length: [
            list(stream.sequence(start, length))
            for start in np.linspace(0, len(stream) - stream.body(length), count).astype(int)
        ]
        for length, count in counts.items()
    }
