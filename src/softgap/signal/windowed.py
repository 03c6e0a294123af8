"""Permutation entropy over time, in sliding windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from softgap.signal.checked import checked_count, checked_series
from softgap.signal.entropy import permutation_entropy

__all__ = ["WindowedEntropy", "windowed_entropy"]

# Values of the windows that are looked at together: neighbours overlap, and their copies would multiply the data.
_BLOCK_VALUES = 1 << 20


@dataclass(frozen=True, eq=False)
class WindowedEntropy:
    """Entropy of each window of each series.

    Attributes
    ----------
    value : float [..., window]
        Normalised permutation entropy; NaN where not ``eligible``.
    tie_rate, eligible, windows
        As for :func:`permutation_entropy`, per window; ``windows`` counts the ordinal windows inside.
    starts : int [window]
        First step of each window.
    width : int
        Steps of a window.
    stride : int
        Steps between the beginnings of two windows.
    """

    value: Float[np.ndarray, "*batch window"]
    windows: Int[np.ndarray, "*batch window"]
    tie_rate: Float[np.ndarray, "*batch window"]
    eligible: Bool[np.ndarray, "*batch window"]
    starts: Int[np.ndarray, " window"]
    width: int
    stride: int

    @property
    def centres(self) -> Float[np.ndarray, " window"]:
        """The middle of each window, in steps."""
        return self.starts + (self.width - 1) / 2


def windowed_entropy(
    x: Any,
    *,
    width: int,
    stride: int | None = None,
    order: int = 3,
    delay: int = 1,
    ties: str = "exclude",
    eligibility: str | int = "spread",
    rng: np.random.Generator | None = None,
) -> WindowedEntropy:
    """Permutation entropy in windows of ``width`` steps along the last axis.

    Windows begin at 0, ``stride``, 2 ``stride``, ...; steps after the last whole window are left out. Feed ``value``
    to :func:`change_points` only with ``stride >= width`` (the default): windows that overlap share values, and what
    they share looks like a level that changes.

    Parameters
    ----------
    x
        Real finite numbers, time last, any leading axes.
    width, stride
        In steps; windows touch unless a stride is given.
    order, delay, ties, eligibility, rng
        Of :func:`permutation_entropy`.
    """
    series = checked_series(x, use="windowed entropy")
    checked_count("width", width, least=2, most=series.shape[-1], remedy=f"the series has {series.shape[-1]} steps")
    step = checked_count("stride", width if stride is None else stride)
    views = np.lib.stride_tricks.sliding_window_view(series, width, axis=-1)[..., ::step, :]
    count = views.shape[-2]
    together = max(1, _BLOCK_VALUES // max(1, views[..., :1, :].size))
    parts = [
        permutation_entropy(
            views[..., at : at + together, :], order=order, delay=delay, ties=ties, eligibility=eligibility, rng=rng
        )
        for at in range(0, count, together)
    ]
    return WindowedEntropy(
        value=np.concatenate([part.value for part in parts], axis=-1),
        windows=np.concatenate([part.windows for part in parts], axis=-1),
        tie_rate=np.concatenate([part.tie_rate for part in parts], axis=-1),
        eligible=np.concatenate([part.eligible for part in parts], axis=-1),
        starts=np.arange(count) * step,
        width=width,
        stride=step,
    )
