"""The iteration of IAAFT on many surrogates at once.

One iteration gives a series the amplitudes of the data in Fourier space, and then the values of the data by rank. The
rows of a block go through one batched transform and one batched sort; rows that no longer change leave the block.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import scipy.fft
from jaxtyping import Bool, Complex128, Float64, Int64

from softgap.signal.compiling import compiled

__all__ = ["iterate", "relative_distance"]

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

    def one(start: int) -> None:
        at = slice(start, min(rows, start + block_rows))
        source = np.arange(at.start, at.stop) // count
        iterations[at], converged[at] = _iterate_block(series[at], ordered, amplitude, source, max_iterations)
        error[at] = relative_distance(amplitude[source], np.abs(scipy.fft.rfft(series[at], axis=-1)))

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, range(0, rows, block_rows)))
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
            wanted = amplitude[source[i], j]
            spectrum[i, j] = value * (wanted / size) if size > 0 else complex(wanted)


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
