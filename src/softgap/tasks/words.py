"""The words that tasks are made of, and pairs of them to be looked up: drawn here, written out where they are asked."""

from __future__ import annotations

from typing import Literal

import numpy as np

from softgap.errors import ValueInputError

__all__ = ["WORDS", "draw_pairs"]

_LIST = """
amber anchor apple arrow basin basket beacon blanket bottle branch bridge bucket butter button cabin candle
carpet castle cedar chain cherry circle cloud copper coral cotton crystal desert dragon eagle ember engine
falcon feather fiddle forest garden ginger glacier hammer harbor hazel honey island ivory jacket jungle
kettle ladder lantern lemon magnet marble meadow mirror needle nickel ocean olive orchid paper pebble pepper
pillow planet pocket prairie quartz rabbit ribbon river rocket saddle salmon satin shadow silver spider
spring stone sugar summer table temple thunder ticket timber tunnel turtle valley velvet violet walnut
willow window winter wool yellow zephyr
"""
WORDS = tuple(_LIST.split())


def draw_pairs(n: int, values: Literal["codes", "words"], *, rng: np.random.Generator) -> list[tuple[str, str]]:
    """``n`` different words, each with a value of its own.

    Parameters
    ----------
    values
        ``codes``: numbers of four digits; ``words``: words of the same list.
    """
    if not 1 <= n <= len(WORDS):
        raise ValueInputError(f"pairs must be between 1 and the {len(WORDS)} words, got {n}")
    keys = rng.permutation(WORDS)[:n]
    drawn = rng.permutation(WORDS)[:n] if values == "words" else rng.choice(9000, size=n, replace=False) + 1000
    return [(str(key), str(value)) for key, value in zip(keys, drawn, strict=True)]
