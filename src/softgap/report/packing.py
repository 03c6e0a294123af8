"""Arrays as text that a page can carry: 16 bits a value, deflated, in base64.

The bytes before deflating, all little-endian, for an array of R rows and C columns:

    low    float32 [R]      value of code 0
    step   float32 [R]      distance between two codes
    high   uint8 [R, C]     the upper bytes of the codes,
    lower  uint8 [R, C]     and the lower ones: apart, because only the upper ones compress

The value is low + step * code; code 65535 is NaN. Every row has its own scale, so that a head that hardly moves keeps
its shape: the error is at most half a step, (greatest - least) / 131068.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64

__all__ = ["CODES", "Packed", "pack", "unpack"]

CODES = 65535
"""Codes that stand for numbers; the one after them is NaN."""


@dataclass(frozen=True)
class Packed:
    """An array as text, with its shape."""

    rows: int
    columns: int
    text: str


def pack(values: Float[np.ndarray, "row column"]) -> Packed:
    """Quantise every row between its least and greatest number; what is not finite becomes NaN."""
    wide = np.asarray(values, np.float64)
    known = np.isfinite(wide)
    least = np.min(wide, axis=1, where=known, initial=np.inf)
    greatest = np.max(wide, axis=1, where=known, initial=-np.inf)
    empty = ~known.any(axis=1)
    low = np.where(empty, 0.0, least).astype("<f4")
    span = np.where(empty, 0.0, greatest) - low
    step = (span / (CODES - 1)).astype("<f4")
    exact = step.astype(np.float64)[:, None]
    place = np.where(known, wide, 0.0) - low.astype(np.float64)[:, None]
    codes = np.rint(np.divide(place, exact, out=np.zeros_like(wide), where=exact > 0)).clip(0, CODES - 1)
    stored = np.where(known, codes, CODES).astype("<u2")
    planes = stored.view(np.uint8).reshape(*stored.shape, 2)
    content = low.tobytes() + step.tobytes() + planes[..., 1].tobytes() + planes[..., 0].tobytes()
    text = base64.b64encode(zlib.compress(content, 9)).decode("ascii")
    return Packed(wide.shape[0], wide.shape[1], text)


def unpack(packed: Packed) -> Float64[np.ndarray, "row column"]:
    """What the page makes of it: the reference for its own decoder."""
    content = zlib.decompress(base64.b64decode(packed.text))
    rows, size = packed.rows, packed.rows * packed.columns
    low, step = np.frombuffer(content, "<f4", 2 * rows).astype(np.float64).reshape(2, rows, 1)
    high, lower = np.frombuffer(content, np.uint8, 2 * size, 8 * rows).reshape(2, rows, packed.columns)
    codes = high.astype(np.int64) * 256 + lower
    return np.asarray(np.where(codes == CODES, np.nan, low + step * codes))
