"""The anatomy of heads as a page carries it: keys and weights of every query, in a few bytes each."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64, Int32

from softgap.report.samples import PackedArray
from softgap.trajectories import Anatomy

__all__ = ["anatomy_json", "pack_anatomy", "unpack_anatomy"]

NO_KEY = 65535
"""Stands for a key that is not there; a longer text than this cannot be packed."""
_LARGEST = 32767


def anatomy_json(heads: Sequence[Anatomy], store: Callable[[PackedArray], Any]) -> list[dict[str, Any]]:
    """What a page is told of some heads of one sample; ``store`` says where a packed array can be found."""
    return [
        {
            "layer": entry.layer,
            "head": entry.head,
            "mechanisms": list(entry.mechanisms),
            "queries": entry.keys.shape[1],
            "top": entry.keys.shape[2],
            "first": entry.first,
            "packed": store(pack_anatomy(entry)),
        }
        for entry in heads
        if entry.keys.shape[1] <= NO_KEY
    ]


def pack_anatomy(entry: Anatomy) -> PackedArray:
    """One head: per row of weights its scale and the sum of the others in float32, then keys and weights of 16 bits.

    Weights are rounded towards zero, so that those of softmax never sum to more than 1. Upper and lower bytes lie
    apart, which is what lets deflate shrink them.
    """
    weights = entry.weights.astype(np.float64)
    # The next float above: dividing by a scale that was rounded down would leave the range.
    scale = np.nextafter(np.abs(weights).max(axis=2, initial=0.0).astype(np.float32), np.float32(np.inf))
    codes = np.trunc(weights / scale.astype(np.float64)[..., None] * _LARGEST).astype("<i2")
    keys = np.where(entry.keys < 0, NO_KEY, entry.keys).astype("<u2")
    planes = [x.view(np.uint8).reshape(*x.shape, 2) for x in (keys, codes)]
    content = scale.astype("<f4").tobytes() + entry.rest.astype("<f4").tobytes()
    content += b"".join(plane[..., byte].tobytes() for plane in planes for byte in (1, 0))
    text = base64.b64encode(zlib.compress(content, 9)).decode("ascii")
    return PackedArray(entry.keys.shape[0], entry.keys.shape[1] * entry.keys.shape[2], text)


def unpack_anatomy(
    packed: PackedArray, top: int
) -> tuple[Int32[np.ndarray, "mechanism query top"], Float64[np.ndarray, "mechanism query top"], np.ndarray]:
    """Keys, weights and the rest, as the page makes them: the reference for its own decoder."""
    content = zlib.decompress(base64.b64decode(packed.text))
    shape = (packed.rows, packed.columns // top, top)
    rows, size = shape[0] * shape[1], packed.rows * packed.columns
    scale, rest = np.frombuffer(content, "<f4", 2 * rows).astype(np.float64).reshape(2, *shape[:2])
    planes = np.frombuffer(content, np.uint8, 4 * size, 8 * rows).reshape(4, *shape).astype(np.int64)
    keys = planes[0] * 256 + planes[1]
    codes = (planes[2] * 256 + planes[3]).astype(np.uint16).view(np.int16)
    weights = codes.astype(np.float64) / _LARGEST * scale[..., None]
    return np.where(keys == NO_KEY, -1, keys).astype(np.int32), weights, rest
