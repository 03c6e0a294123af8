"""Vectors of float32 numbers in compiled code: load, store, multiply and add, exponential, sum.

numba compiles loops over single numbers and leaves it to LLVM which of them become vector instructions. Here that is
written down, because the sums of ``fused.py`` must stay in registers. A vector has ``LANES`` numbers; LLVM splits it
where the registers of the processor are shorter, so the code runs everywhere.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding as llvm
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

__all__ = [
    "LANES",
    "SUMS",
    "compiled",
    "compiled_with",
    "dot_rows",
    "elu1",
    "exp",
    "exponentials",
    "fill",
    "larger",
    "largest",
    "load",
    "multiply_add",
    "share_out",
    "sources",
    "spread",
    "store",
    "sum_rows",
    "total",
]

# Two registers of AVX-512, four of AVX2 or NEON: enough independent sums to hide the time that one product takes.
LANES = 32 if llvm.get_host_cpu_features().get("avx512f") else 16

_FLOATS, _WORDS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)

Array = np.ndarray[Any, Any]
# Sums may be reordered, so that they run in vector registers; NaN and infinities keep their meaning.
SUMS = {"reassoc", "contract", "nsz", "arcp"}

Function = TypeVar("Function", bound=Callable[..., Any])
_Code = Callable[[Any, Any, Any, Any], Any]


def compiled_with(**options: Any) -> Callable[[Function], Function]:
    """Return a decorator: machine code on one thread, kept on disk where there is a folder for it."""

    def compile_function(function: Function) -> Function:
        try:
            dispatcher = numba.njit(nogil=True, cache=True, error_model="numpy", **options)(function)
            _notice_all_sources(dispatcher)
            return cast(Function, dispatcher)
        except RuntimeError:  # a read-only install without a user cache
            return cast(Function, numba.njit(nogil=True, error_model="numpy", **options)(function))

    return compile_function


def _notice_all_sources(dispatcher: Any) -> None:
    """Let code on disk be of these very sources: numba looks at the file of a function, not at what it calls."""
    kept: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if hasattr(kept, "_source_stamp"):
        kept._source_stamp = (kept._source_stamp, sources(Path(__file__).parent))


@functools.cache
def sources(folder: Path) -> str:
    """A hash of all modules of a folder from which compiled functions call each other."""
    files = sorted({*folder.glob("*_kernel.py"), *folder.glob("decode_arrays.py"), *folder.glob("simd.py")})
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def compiled(function: Function) -> Function:
    """Machine code without options of numba's."""
    return compiled_with()(function)


def share_out(task: Callable[[int, int], None], units: int) -> None:
    """Run a compiled task over units from a first to before a last, on as many threads as torch may use.

    The threads are torch's own where they are those of OpenMP. After each of its operations they wait actively for the
    next one, 300,000 spins by default (GCC's manual, GOMP_SPINCOUNT): other threads would share the cores with them.
    """
    threads = min(units, torch.get_num_threads())
    if threads <= 1:
        task(0, units)
        return
    # One unit at a time: a thread that was late takes fewer. Compiled code lets go of Python's lock.
    remaining, failures = iter(range(units)), list[BaseException]()

    def work() -> None:
        try:
            for unit in remaining:
                task(unit, unit + 1)
        except BaseException as error:
            failures.append(error)

    _team()(work, threads)
    if failures:
        raise failures[0]


@functools.cache
def _team() -> Callable[[Callable[[], None], int], None]:
    """What calls a function on so many threads at once."""
    return _openmp_team() or _python_team


def _openmp_team() -> Callable[[Callable[[], None], int], None] | None:
    """The threads that torch's operations use; None where torch does not use OpenMP by this interface."""
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    try:
        # Looked up in torch's library, the function is that of the very OpenMP that torch is linked with.
        name = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
        parallel = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes, parallel.restype = [entry, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None

    def run(work: Callable[[], None], threads: int) -> None:
        parallel(entry(lambda _: work()), None, threads, 0)

    return run


def _python_team(work: Callable[[], None], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work) for _ in range(threads)]:
            done.result()


class _Lanes(types.Type):
    """The type of a vector."""

    def __init__(self) -> None:
        super().__init__(name=f"float32x{LANES}")


class _LanesModel(models.PrimitiveModel):
    """How a vector is held: as a vector of LLVM."""

    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)  # type: ignore[no-untyped-call]


register_model(_Lanes)(_LanesModel)
_lanes: Any = _Lanes()


def _operation(function: Callable[..., tuple[Any, _Code]]) -> Any:
    """An operation of compiled code; the function says its types and writes its instructions."""
    return intrinsic(function)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), _FLOATS.as_pointer())


def _constant(value: float) -> Any:
    return ir.Constant(_FLOATS, [ir.Constant(ir.FloatType(), value)] * LANES)


def _word(value: int) -> Any:
    return ir.Constant(_WORDS, [ir.Constant(ir.IntType(32), value)] * LANES)


@_operation
def load(typing: Any, array: Any, index: Any) -> tuple[Any, _Code]:
    """The numbers of a flat array from an index on."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load(_pointer(context, builder, signature.args[0], *values), align=4, typ=_FLOATS)

    return _lanes(array, types.intp), code


@_operation
def store(typing: Any, array: Any, index: Any, a: Any) -> tuple[Any, _Code]:
    """Write a vector to a flat array from an index on."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array, index, a = values
        builder.store(a, _pointer(context, builder, signature.args[0], array, index), align=4)
        return context.get_dummy_value()

    return types.none(array, types.intp, a), code


def _repeat(builder: Any, number: Any) -> Any:
    nothing = ir.Constant(_FLOATS, ir.Undefined)
    first = builder.insert_element(nothing, number, ir.IntType(32)(0))
    return builder.shuffle_vector(first, nothing, _word(0))


@_operation
def fill(typing: Any, value: Any) -> tuple[Any, _Code]:
    """A vector of one number."""
    return _lanes(types.float32), lambda context, builder, signature, values: _repeat(builder, values[0])


@_operation
def spread(typing: Any, array: Any, index: Any) -> tuple[Any, _Code]:
    """A vector of the one number at an index of a flat array, which is not checked for counting from the end."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        return _repeat(builder, builder.load(builder.gep(data, [values[1]]), align=4, typ=ir.FloatType()))

    return _lanes(array, types.intp), code


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    # One instruction where the processor has it.
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


@_operation
def multiply_add(typing: Any, a: Any, b: Any, c: Any) -> tuple[Any, _Code]:
    """a * b + c."""
    return _lanes(_lanes, _lanes, _lanes), lambda context, builder, signature, values: _multiply_add(builder, *values)


@_operation
def larger(typing: Any, a: Any, b: Any) -> tuple[Any, _Code]:
    """The larger of two, number by number; a NaN of b is passed over."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        a, b = values
        return builder.select(builder.fcmp_ordered(">", b, a), b, a)

    return _lanes(_lanes, _lanes), code


def _reduce(name: str, start: float | None, flags: tuple[str, ...]) -> _Code:
    """A reduction of LLVM to one number."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        before = [] if start is None else [ir.Constant(ir.FloatType(), start)]
        kind = ir.FunctionType(ir.FloatType(), [*(x.type for x in before), _FLOATS])
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.{name}.v{LANES}f32")
        return builder.call(function, [*before, *values], fastmath=flags)

    return code


@_operation
def total(typing: Any, a: Any) -> tuple[Any, _Code]:
    """The sum of a vector, added pair by pair."""
    return types.float32(_lanes), _reduce("fadd", -0.0, ("reassoc",))


@_operation
def largest(typing: Any, a: Any) -> tuple[Any, _Code]:
    """The largest number of a vector."""
    return types.float32(_lanes), _reduce("fmax", None, ())


# Of Cephes' expf: exp(r) is 1 + r + r^2 times these, from the highest power on, for |r| <= log(2) / 2.
_POWERS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
    1.0,
    1.0,
)
# log(2) in two parts, the first of which has few digits, so that its multiples are exact.
_LOG_2 = (0.693359375, -2.12194440e-4)
# exp of less is no float32 above 0.
_LOWEST = -104.0


def _exp(builder: Any, x: Any) -> Any:
    """exp(x) = 2^n exp(r) with r = x - n log(2), for x of at most 0; NaN stays NaN."""
    lowest = _constant(_LOWEST)
    within = builder.select(builder.fcmp_ordered(">", x, lowest), x, lowest)
    # Conversion cuts towards 0: the nearest whole number, since x is not positive.
    n = builder.fptosi(_multiply_add(builder, within, _constant(1.4426950408889634), _constant(-0.5)), _WORDS)
    whole, r = builder.sitofp(n, _FLOATS), x
    for part in _LOG_2:
        r = _multiply_add(builder, whole, _constant(-part), r)
    result = _constant(_POWERS[0])
    for power in _POWERS[1:]:
        result = _multiply_add(builder, result, r, _constant(power))
    # 2^n as a product of two: one alone would leave the range where the result has few digits.
    half = builder.ashr(n, _word(1))
    for exponent in (half, builder.sub(n, half)):
        bits = builder.shl(builder.add(exponent, _word(127)), _word(23))
        result = builder.fmul(result, builder.bitcast(bits, _FLOATS))
    return builder.select(builder.fcmp_ordered("<", x, lowest), _constant(0.0), result)


@_operation
def exp(typing: Any, a: Any) -> tuple[Any, _Code]:
    """The exponential of numbers that are not positive, to the last digit but one."""
    return _lanes(_lanes), lambda context, builder, signature, values: _exp(builder, values[0])


@_operation
def elu1(typing: Any, a: Any) -> tuple[Any, _Code]:
    """exp(x) below 0, x + 1 above."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, zero = values[0], _constant(0.0)
        # NaN is below, and stays NaN.
        below = builder.select(builder.fcmp_ordered(">=", x, zero), zero, x)
        above = builder.select(builder.fcmp_ordered(">", x, zero), x, zero)
        return builder.fadd(_exp(builder, below), above)

    return _lanes(_lanes), code


# Loops over single numbers, whose vectors are LLVM's.
_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)
_FAR_BELOW, _FAR_ABOVE = np.float32(-87.3), np.float32(88.3)
_LOG2E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504088896341), np.float32(0.693359375), np.float32(-2.12194440e-4)
# Minimax coefficients of exp on [-ln 2 / 2, ln 2 / 2] (Cephes, expf).
_C0, _C1, _C2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_C3, _C4, _C5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_BIAS = np.int32(127)


@compiled
def exponentials(x: Array, bits: Array) -> None:
    """exp(x) in place, to 2 units in the last place; ``bits`` holds as many int32.

    The same as a loop over libm's expf, but without a call, so that it runs in vector registers.
    """
    powers = bits.view(np.float32)
    for i in range(x.size):
        y = min(max(x[i], _FAR_BELOW), _FAR_ABOVE)
        n = np.floor(y * _LOG2E + _HALF)
        r = (y - n * _LN2_HIGH) - n * _LN2_LOW
        p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
        bits[i] = (np.int32(n) + _BIAS) << np.int32(23)
        x[i] = _ZERO if x[i] < _FAR_BELOW else p * r * r + r + _ONE
    for i in range(x.size):
        x[i] *= powers[i]


@compiled_with(fastmath=SUMS)
def dot_rows(matrix: Array, x: Array, out: Array) -> None:
    """out = matrix x, four rows at a time."""
    whole = out.size - out.size % 4
    for i in range(0, whole, 4):
        a, b, c, d = _ZERO, _ZERO, _ZERO, _ZERO
        for j in range(x.size):
            a += matrix[i, j] * x[j]
            b += matrix[i + 1, j] * x[j]
            c += matrix[i + 2, j] * x[j]
            d += matrix[i + 3, j] * x[j]
        out[i], out[i + 1], out[i + 2], out[i + 3] = a, b, c, d
    for i in range(whole, out.size):
        a = _ZERO
        for j in range(x.size):
            a += matrix[i, j] * x[j]
        out[i] = a


@compiled_with(fastmath=SUMS)
def sum_rows(weights: Array, matrix: Array, out: Array) -> None:
    """out += weights matrix, four rows at a time."""
    n = weights.size
    whole = n - n % 4
    for i in range(0, whole, 4):
        a, b, c, d = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        for e in range(out.size):
            out[e] += a * matrix[i, e] + b * matrix[i + 1, e] + c * matrix[i + 2, e] + d * matrix[i + 3, e]
    for i in range(whole, n):
        for e in range(out.size):
            out[e] += weights[i] * matrix[i, e]
