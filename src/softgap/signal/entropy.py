"""Entropies of ordinal patterns: Shannon, Renyi, weighted, multiscale, and in sliding windows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from jaxtyping import Bool, Float, Int

from softgap.errors import ValueInputError
from softgap.inputs import check_count
from softgap.signal.kernels import shannon_rows
from softgap.signal.patterns import Block, Options, SeriesBatch, check_batch
from softgap.signal.results import Entropy
from softgap.signal.validation import check_series

__all__ = [
    "WindowedEntropy",
    "check_q",
    "multiscale_entropy",
    "permutation_entropy",
    "probabilities",
    "reduce_blocks",
    "renyi",
    "renyi_entropy",
    "shannon",
    "weighted_permutation_entropy",
    "windowed_entropy",
]


Probabilities = Float[np.ndarray, "series pattern"]


Reducer = Callable[[np.ndarray], np.ndarray]


# Beyond this 2^q overflows in the divergences; every entropy is at its limit long before.
_LARGEST_Q = 500.0


def reduce_blocks(
    batch: SeriesBatch,
    blocks: Iterable[Block],
    reduce: Reducer,
    trailing: tuple[int, ...] = (),
    *,
    weighted: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Apply ``reduce`` [series, pattern] -> [series, *trailing] to the eligible series; NaN for the others.

    Returns values, windows, tie rate and eligibility with the leading axes of the input.
    """
    series = len(batch.rows)
    values = np.full((series, *trailing), np.nan)
    windows, rate, eligible = np.empty(series, np.int64), np.empty(series), np.empty(series, bool)
    for block in blocks:
        some = block.eligible
        if weighted:  # weights, unlike counts, may all be zero
            some = some & (block.table.sum(axis=1) > 0)
        values[block.where][some] = reduce(block.table if some.all() else block.table[some])
        windows[block.where], rate[block.where], eligible[block.where] = block.windows, block.tie_rate, some
    shaped = batch.restore_shape
    return shaped(values), shaped(windows), shaped(rate), shaped(eligible)


def permutation_entropy(
    x: Any, order: int = 3, delay: int = 1, *, normalised: bool = True, **options: Unpack[Options]
) -> Entropy:
    """Shannon entropy of the pattern frequencies of each series.

    H = -sum_i p_i log p_i, divided by log(order!) if ``normalised``, else in nats (Bandt and Pompe 2002).

    Parameters
    ----------
    x
        Real numbers, time last, any leading axes: one value per series.
    order
        Values per window, 2 to 8.
    delay
        Steps between neighbouring values of a window.
    normalised
        Divide by log(order!), so that white noise is near 1; False gives nats.
    **options
        ``ties``, ``rng``, ``lengths`` and ``eligibility``; see ``Options``.

    Returns
    -------
    Entropy
        ``value``, the number of ``windows`` and whether they are enough (``eligible``), per series.

    Notes
    -----
    The plug-in estimate is biased low at short length: ``corrected_entropy`` corrects it, ``z_scores``
    compares it with noise of the same length, ``rarefied_entropy`` with series of other lengths.

    Examples
    --------
    >>> import numpy as np
    >>> from softgap.signal import permutation_entropy
    >>> rng = np.random.default_rng(0)
    >>> noise, line = rng.standard_normal(1000), np.arange(1000.0)
    >>> permutation_entropy(np.stack([noise, line])).value.round(2) + 0.0
    array([1., 0.])
    """
    batch = check_batch(x, order, delay, options)
    return Entropy(*reduce_blocks(batch, batch.entropies(), _in_unit(batch, normalised)))


def weighted_permutation_entropy(
    x: Any, order: int = 3, delay: int = 1, *, normalised: bool = True, **options: Unpack[Options]
) -> Entropy:
    """Permutation entropy with each window counted by the variance of its values.

    p_i is the summed variance of the windows with pattern i over that of all windows (Fadlallah et al., Phys. Rev. E
    87, 022911 (2013)). A series whose windows all have variance 0 is not eligible.
    """
    batch = check_batch(x, order, delay, options)
    unit = batch.unit(normalised)

    def reduce(weights: np.ndarray) -> np.ndarray:
        entropy = np.empty(len(weights))
        shannon_rows(weights, entropy)
        return entropy / unit

    return Entropy(*reduce_blocks(batch, batch.weights(), reduce, weighted=True))


def renyi_entropy(
    x: Any,
    q: float | Sequence[float],
    order: int = 3,
    delay: int = 1,
    *,
    normalised: bool = True,
    **options: Unpack[Options],
) -> Entropy:
    """Renyi entropy of the pattern frequencies, with an axis for ``q`` at the end if it is a sequence.

    H_q = log(sum_i p_i^q) / (1 - q), Shannon at q = 1, the log of the number of patterns seen at q = 0; divided by
    log(order!) if ``normalised``. Keywords as in ``permutation_entropy``. In nats it gives the Tsallis entropy too:
    S_q = (exp((1 - q) H_q) - 1) / (1 - q).
    """
    grid = check_q(q)
    batch = check_batch(x, order, delay, options)
    unit = batch.unit(normalised)

    def reduce(counts: np.ndarray) -> np.ndarray:
        p = probabilities(counts)
        return np.stack([renyi(p, value) / unit for value in np.atleast_1d(grid)], axis=-1)

    values, *rest = reduce_blocks(batch, batch.counts(), reduce, (grid.size,))
    return Entropy(values if grid.ndim else values[..., 0], *rest)


def multiscale_entropy(
    x: Any,
    scales: Sequence[int],
    order: int = 3,
    delay: int = 1,
    *,
    normalised: bool = True,
    **options: Unpack[Options],
) -> Entropy:
    """Permutation entropy of coarse-grained series, with an axis for ``scales`` at the end.

    At scale s the series is replaced by the means of its consecutive, disjoint stretches of s steps (Costa et al.,
    Phys. Rev. Lett. 89, 068102 (2002)); an incomplete stretch at the end is dropped. A scale that leaves too
    few windows is not eligible.
    """
    batch = check_batch(x, order, delay, options)
    results = []
    for scale in scales:
        step = check_count("a scale", scale)
        steps = batch.rows.shape[1] // step
        # The count is spelled out: reshape cannot infer it where a scale leaves no step.
        parts = batch.rows[:, : steps * step].reshape(len(batch.rows), steps, step)
        coarse = parts.mean(axis=-1) if step > 1 else batch.rows
        scaled_options: Options = {**options, "lengths": batch.lengths // step}
        cut = check_batch(coarse, order, delay, scaled_options, short=True)
        results.append(reduce_blocks(cut, cut.entropies(), _in_unit(cut, normalised)))
    if not results:
        raise ValueInputError(f"scales must be one or more whole numbers from 1, got {list(scales)}")
    return Entropy(*(batch.restore_shape(np.stack(parts, axis=-1)) for parts in zip(*results, strict=True)))


def probabilities(counts: np.ndarray) -> Probabilities:
    """Rows of counts as frequencies."""
    return np.asarray(counts / counts.sum(axis=-1, keepdims=True))


def log_where_positive(p: np.ndarray) -> np.ndarray:
    """Log p, and 0 where p is 0."""
    return np.asarray(np.log(p, out=np.zeros_like(p), where=p > 0))


def shannon(p: Probabilities) -> Float[np.ndarray, " series"]:
    """-sum p log p along the last axis, in nats."""
    return np.asarray(-(p * log_where_positive(p)).sum(axis=-1))


def renyi(p: Probabilities, q: float) -> Float[np.ndarray, " series"]:
    """Renyi entropy in nats along the last axis."""
    if q == 1:
        return shannon(p)
    log_p = log_where_positive(p)
    if abs(q - 1) < 0.5:  # sum p^q - 1 = sum p (p^(q-1) - 1), which keeps its digits near q = 1
        return np.asarray(np.log1p((p * np.expm1((q - 1) * log_p)).sum(axis=-1)) / (1 - q))
    largest = p.max(axis=-1, keepdims=True)
    powers = np.where(p > 0, np.exp(q * (log_p - np.log(largest))), 0.0)
    return np.asarray((q * np.log(largest[..., 0]) + np.log(powers.sum(axis=-1))) / (1 - q))


def check_q(q: float | Sequence[float]) -> Float[np.ndarray, ...]:
    """``q`` as one number or a list of numbers from 0 to 500."""
    grid = np.asarray(q)
    if grid.dtype.kind not in "fiu" or grid.ndim > 1 or grid.size == 0:
        raise ValueInputError(f"q must be a number or a list of numbers, got {q!r}")
    wrong = ~((grid >= 0) & (grid <= _LARGEST_Q))
    if wrong.any():
        raise ValueInputError(f"q must be between 0 and {_LARGEST_Q:g}, got {grid[wrong].flat[0]}")
    return grid.astype(float)


def _in_unit(batch: SeriesBatch, normalised: bool) -> Reducer:
    unit = batch.unit(normalised)
    return lambda entropy: np.asarray(entropy[:, 0] / unit)


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
        As for ``permutation_entropy``, per window; ``windows`` counts the ordinal windows inside.
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
    to ``change_points`` only with ``stride >= width`` (the default): windows that overlap share values, and what
    they share looks like a level that changes.

    Parameters
    ----------
    x
        Real finite numbers, time last, any leading axes.
    width, stride
        In steps; windows touch unless a stride is given.
    order, delay, ties, eligibility, rng
        Of ``permutation_entropy``.
    """
    series = check_series(x, use="windowed entropy")
    check_count("width", width, least=2, most=series.shape[-1], remedy=f"the series has {series.shape[-1]} steps")
    step = check_count("stride", width if stride is None else stride)
    views = np.lib.stride_tricks.sliding_window_view(series, width, axis=-1)[..., ::step, :]
    count = views.shape[-2]
    windows_per_block = max(1, _BLOCK_VALUES // max(1, views[..., :1, :].size))
    parts = [
        permutation_entropy(
            views[..., at : at + windows_per_block, :],
            order=order,
            delay=delay,
            ties=ties,
            eligibility=eligibility,
            rng=rng,
        )
        for at in range(0, count, windows_per_block)
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
