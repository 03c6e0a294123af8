"""Surrogate series that keep some properties of a series and destroy the rest."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.fft
from jaxtyping import Bool, Complex128, Float64, Int64

from softgap.errors import UnsupportedError, unknown_name
from softgap.inputs import check_count, check_rng
from softgap.signal.kernels import compiled
from softgap.signal.validation import check_series

__all__ = ["SURROGATES", "Convergence", "Surrogates", "spectrum_error", "surrogates"]


Rows = Float64[np.ndarray, "row time"]


def iterate(
    series: Rows, data: Float64[np.ndarray, "source time"], *, max_iterations: int, workers: int, block_rows: int
) -> tuple[Int64[np.ndarray, " row"], Bool[np.ndarray, " row"], Float64[np.ndarray, " row"]]:
    """Iterate every row of ``series`` in place; iterations, convergence and spectrum error of each.

    The rows of ``series`` are permutations of the rows of ``data``, in order and equally many for each.
    """
    rows, count = len(series), len(series) // max(1, len(data))
    ordered = np.sort(data, axis=-1)
    amplitude = np.abs(scipy.fft.rfft(data, axis=-1))
    iterations, converged, error = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=bool), np.zeros(rows)

    def iterate_rows(start: int) -> None:
        at = slice(start, min(rows, start + block_rows))
        source = np.arange(at.start, at.stop) // count
        iterations[at], converged[at] = _iterate_block(series[at], ordered, amplitude, source, max_iterations)
        error[at] = relative_distance(amplitude[source], np.abs(scipy.fft.rfft(series[at], axis=-1)))

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(iterate_rows, range(0, rows, block_rows)))
    return iterations, converged, error


def _iterate_block(
    series: Rows,
    ordered: Float64[np.ndarray, "source time"],
    amplitude: Float64[np.ndarray, "source frequency"],
    source: Int64[np.ndarray, " row"],
    max_iterations: int,
) -> tuple[Int64[np.ndarray, " row"], Bool[np.ndarray, " row"]]:
    time = series.shape[-1]
    bits = (time - 1).bit_length()
    iterations, converged = np.full(len(series), max_iterations), np.zeros(len(series), dtype=bool)
    active, work = np.arange(len(series)), series.copy()
    for iteration in range(1, max_iterations + 1):
        spectrum = scipy.fft.rfft(work, axis=-1)
        _impose_amplitude(spectrum, amplitude, source)
        shaped = scipy.fft.irfft(spectrum, n=time, axis=-1, overwrite_x=True)
        keys = shaped.view(np.int64)
        _pack_index(keys, bits)
        keys.sort(axis=-1)
        changed = _assign_by_rank(work, keys, ordered, source, bits)
        if not changed.all():
            done = active[~changed]
            series[done], iterations[done], converged[done] = work[~changed], iteration, True
            active, work, source = active[changed], work[changed], source[changed]
            if not len(active):
                break
    series[active] = work
    return iterations, converged


def relative_distance(
    amplitude: Float64[np.ndarray, "*batch frequency"], other: Float64[np.ndarray, "*batch frequency"]
) -> Float64[np.ndarray, "*batch"]:
    """``|other - amplitude|_2 / |amplitude|_2`` over all frequencies but the first, the mean."""
    size = np.linalg.norm(amplitude[..., 1:], axis=-1)
    # Nothing but rounding errors is left of a constant series, and their ratio would mean nothing.
    least = 1e-10 * amplitude[..., 0] + np.finfo(np.float64).tiny
    return np.asarray(np.linalg.norm((other - amplitude)[..., 1:], axis=-1) / np.maximum(size, least))


@compiled
def _impose_amplitude(
    spectrum: Complex128[np.ndarray, "row frequency"],
    amplitude: Float64[np.ndarray, "source frequency"],
    source: Int64[np.ndarray, " row"],
) -> None:
    """Keep the phases of ``spectrum`` and take the amplitudes of its source; phase 0 where there is none."""
    for i in range(spectrum.shape[0]):
        for j in range(spectrum.shape[1]):
            value = spectrum[i, j]
            size = np.sqrt(value.real * value.real + value.imag * value.imag)
            target = amplitude[source[i], j]
            spectrum[i, j] = value * (target / size) if size > 0 else complex(target)


@compiled
def _pack_index(keys: Int64[np.ndarray, "row time"], bits: int) -> None:
    """Make integers that sort as the float64 values they hold, with each value's place in the lowest ``bits``.

    A sort of such integers is an argsort at a third of its price. The values keep 52 - bits binary digits; nearer
    ones count as equal and stay in order of time.
    """
    low = (np.int64(1) << bits) - 1
    for i in range(keys.shape[0]):
        for j in range(keys.shape[1]):
            key = keys[i, j]
            if key < 0:
                key ^= np.int64(0x7FFFFFFFFFFFFFFF)
            keys[i, j] = (key & ~low) | j


@compiled
def _assign_by_rank(
    work: Rows,
    keys: Int64[np.ndarray, "row time"],
    ordered: Float64[np.ndarray, "source time"],
    source: Int64[np.ndarray, " row"],
    bits: int,
) -> Bool[np.ndarray, " row"]:
    """Put the values of each row's source in the order of its keys, and say which rows that changed."""
    low = (np.int64(1) << bits) - 1
    changed = np.zeros(work.shape[0], dtype=np.bool_)
    for i in range(work.shape[0]):
        for j in range(work.shape[1]):
            place = keys[i, j] & low
            value = ordered[source[i], j]
            if work[i, place] != value:
                work[i, place] = value
                changed[i] = True
    return changed


SURROGATES = ("shuffle", "block_shuffle", "phase", "aaft", "iaaft")


"""Methods by name."""


_FEWEST_STEPS = 4


_MOST_ITERATIONS = 1000


# Values of one working array at a time; a few such arrays stay within a core's cache.
_BLOCK_VALUES = 1 << 17


@dataclass(frozen=True, eq=False)
class Convergence:
    """How far the iteration of ``iaaft`` came, one entry per surrogate.

    Attributes
    ----------
    iterations : int64 [..., surrogate]
        Iterations made, the last one (which changed nothing) included.
    converged : bool [..., surrogate]
        Whether the last iteration changed nothing.
    spectrum_error : float64 [..., surrogate]
        Of the result, see ``spectrum_error``.
    """

    iterations: Int64[np.ndarray, "*batch surrogate"]
    converged: Bool[np.ndarray, "*batch surrogate"]
    spectrum_error: Float64[np.ndarray, "*batch surrogate"]


@dataclass(frozen=True, eq=False)
class Surrogates:
    """Surrogates of a batch of series.

    Attributes
    ----------
    series : float64 [..., surrogate, time]
        The leading axes are those of the data.
    method : str
        One of ``SURROGATES``.
    convergence : Convergence or None
        For ``iaaft`` only; no other method iterates.
    """

    series: Float64[np.ndarray, "*batch surrogate time"]
    method: str
    convergence: Convergence | None = None


def surrogates(
    x: Any,
    method: str,
    count: int = 100,
    *,
    rng: np.random.Generator,
    block: int | None = None,
    max_iterations: int | None = None,
    workers: int = 1,
) -> Surrogates:
    """``count`` surrogates of each series, in one call.

    Memory is the result plus a fixed block of working arrays. The result depends on ``rng`` alone, not on
    ``workers``.

    Parameters
    ----------
    x
        Real finite numbers, time last, at least 4 steps, any leading axes.
    method
        "shuffle": values in random order.
        "block_shuffle": blocks of ``block`` values in random order. The cut is placed at random for each surrogate, so
        the first and the last block may be shorter (Kunsch 1989 has the idea for the bootstrap).
        "phase": Fourier phases drawn uniformly, amplitudes kept; mean and, for even lengths, the Nyquist term stay
        (Theiler et al. 1992, Physica D 58, section 2.4.1).
        "aaft": amplitude-adjusted Fourier transform: Gaussian values in the rank order of x, phase-randomised, their
        ranks given to the values of x (ibid., section 2.4.2). Its spectrum is flatter than the data's.
        "iaaft": iterated until values and spectrum agree (Schreiber and Schmitz 1996, PRL 77, 635). Ends on the step
        that restores the values, so values are exact and the spectrum is close; how close is reported.
    count
        Surrogates per series.
    rng
        The only source of randomness.
    block
        For "block_shuffle", which needs it: from 1 to half the series.
    max_iterations
        For "iaaft": where to stop a surrogate that still changes; 1,000 unless told.
    workers
        Threads over blocks of surrogates ("iaaft") or over the transforms ("phase", "aaft").

    Returns
    -------
    Surrogates
        ``series`` ``[..., count, step]``, and for "iaaft" how each one converged.

    Examples
    --------
    >>> import numpy as np
    >>> from softgap.signal import surrogates
    >>> rng = np.random.default_rng(0)
    >>> x = rng.standard_normal((2, 9, 100)).cumsum(-1)
    >>> surrogates(x, "iaaft", 19, rng=rng).series.shape
    (2, 9, 19, 100)
    """
    if method not in SURROGATES:
        raise unknown_name("surrogate", method, SURROGATES)
    series = check_series(x, least=_FEWEST_STEPS, use=f"surrogate '{method}'")
    _check_counts(method, series.shape[-1], count, block, max_iterations, workers)
    check_rng(rng)
    time, shape = series.shape[-1], (*series.shape[:-1], count)
    rows = series.reshape(-1, time)
    initial = _draw_surrogates(rows, method, count, block, rng, workers)
    convergence = None
    if method == "iaaft":
        limit = _MOST_ITERATIONS if max_iterations is None else max_iterations
        iteration = iterate(initial, rows, max_iterations=limit, workers=workers, block_rows=_block_rows(time))
        convergence = Convergence(*(each.reshape(shape) for each in iteration))
    return Surrogates(initial.reshape(*shape, time), method, convergence)


def spectrum_error(x: Any, other: Any) -> Float64[np.ndarray, "*batch"]:
    """Relative distance of two amplitude spectra, ``| |X| - |Y| |_2 / | |X| |_2`` over all frequencies but 0.

    Both have time last and leading axes that broadcast. 0 means the same autocorrelation. The mean is left out: its
    amplitude would hide all the others.
    """
    return relative_distance(
        np.abs(scipy.fft.rfft(check_series(x), axis=-1)), np.abs(scipy.fft.rfft(check_series(other), axis=-1))
    )


def _check_counts(
    method: str, time: int, count: int, block: int | None, max_iterations: int | None, workers: int
) -> None:
    check_count("count", count)
    check_count("workers", workers)
    if method == "block_shuffle":
        check_count("block", block, most=time // 2, remedy=f"the series has {time} steps")
    elif block is not None:
        raise UnsupportedError(f"surrogate '{method}' has no blocks, got block={block!r}; use 'block_shuffle'")
    if max_iterations is None:
        return
    if method != "iaaft":
        raise UnsupportedError(
            f"surrogate '{method}' does not iterate, got max_iterations={max_iterations!r}; use 'iaaft'"
        )
    check_count("max_iterations", max_iterations)


def _draw_surrogates(
    rows: Rows, method: str, count: int, block: int | None, rng: np.random.Generator, workers: int
) -> Float64[np.ndarray, "surrogate time"]:
    """``count`` surrogates of each row, one row after the other, drawn a block at a time."""
    surrogates = np.empty((len(rows) * count, rows.shape[-1]))
    step = _block_rows(rows.shape[-1])
    for start in range(0, len(surrogates), step):
        stop = min(start + step, len(surrogates))
        source = rows[np.arange(start, stop) // count]
        surrogates[start:stop] = _draw_one_each(source, method, block, rng, workers)
    return surrogates


def _block_rows(time: int) -> int:
    return max(1, _BLOCK_VALUES // time)


def _draw_one_each(x: Rows, method: str, block: int | None, rng: np.random.Generator, workers: int) -> Rows:
    """One surrogate of each row; for ``iaaft`` the shuffle that its iteration begins with."""
    if method == "phase":
        return _randomise_phases(x, rng, workers)
    if method == "aaft":
        return _adjust_amplitudes(x, rng, workers)
    if method == "block_shuffle" and block is not None:
        return _shuffle_blocks(x, block, rng)
    return rng.permuted(x, axis=-1)


def _shuffle_blocks(x: Rows, block: int, rng: np.random.Generator) -> Rows:
    count, time = x.shape
    member = (np.arange(time) + rng.integers(block, size=(count, 1))) // block
    key = rng.random((count, time // block + 2))
    # Equal keys within a block, and a stable sort: blocks move, their inside does not.
    order = np.argsort(np.take_along_axis(key, member, axis=-1), axis=-1, kind="stable")
    return np.take_along_axis(x, order, axis=-1)


def _randomise_phases(x: Rows, rng: np.random.Generator, workers: int) -> Rows:
    count, time = x.shape
    spectrum = scipy.fft.rfft(x, axis=-1, workers=workers)
    # Neither the mean nor, for even lengths, the last frequency has a phase.
    free = slice(1, (time + 1) // 2)
    spectrum[:, free] *= np.exp(1j * rng.uniform(0, 2 * math.pi, (count, free.stop - 1)))
    return np.asarray(scipy.fft.irfft(spectrum, n=time, axis=-1, overwrite_x=True, workers=workers))


def _adjust_amplitudes(x: Rows, rng: np.random.Generator, workers: int) -> Rows:
    gaussian = np.empty(x.shape)
    values = np.sort(rng.standard_normal(x.shape), axis=-1)
    np.put_along_axis(gaussian, np.argsort(x, axis=-1, kind="stable"), values, axis=-1)
    order = np.argsort(_randomise_phases(gaussian, rng, workers), axis=-1)
    np.put_along_axis(gaussian, order, np.sort(x, axis=-1), axis=-1)
    return gaussian
