"""Pieces that the CPU kernels are made of: bfloat16 in registers, memory by address, products of a few rows.

Everything is compiled by Numba for the processor at hand, and computes in fp32. Sums may be reordered, but NaN and
infinity keep their meaning: what one adapter computes stays in its own rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic, overload

FAST: dict[str, Any] = {
    "nogil": True,
    "cache": True,
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
    "error_model": "numpy",
}

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)


@intrinsic
def _widen(typingctx: Any, bits: Any) -> Any:
    """The float32 of bfloat16 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(word, ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def _narrow(typingctx: Any, value: Any) -> Any:
    """The bfloat16 bits nearest to a float32, ties to even; NaN stays NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i32 = ir.IntType(32)
        bits = builder.bitcast(args[0], i32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(i32, 16)), ir.Constant(i32, 1))
        rounded = builder.lshr(builder.add(builder.add(bits, ir.Constant(i32, 0x7FFF)), odd), ir.Constant(i32, 16))
        magnitude = builder.and_(bits, ir.Constant(i32, 0x7FFFFFFF))
        is_nan = builder.icmp_unsigned(">", magnitude, ir.Constant(i32, 0x7F800000))
        return builder.trunc(builder.select(is_nan, ir.Constant(i32, 0x7FC0), rounded), ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def _power_of_two(typingctx: Any, exponent: Any) -> Any:
    """2**exponent of an int32 within the range of normal float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i32 = ir.IntType(32)
        biased = builder.add(args[0], ir.Constant(i32, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(i32, 23)), ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def _pointer(typingctx: Any, address: Any, like: Any) -> Any:
    """A pointer to elements of the array `like`'s type."""
    result = types.CPointer(like.dtype)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(result))

    return result(address, like), codegen


def as_float(value: Any) -> Any:
    """float32 of an element: of bfloat16 bits (uint16) or of a float32."""
    raise NotImplementedError


@overload(as_float)
def _as_float(value: Any) -> Any:
    def of_bits(value: Any) -> Any:
        return _widen(value)

    def itself(value: Any) -> Any:
        return value

    return of_bits if value == types.uint16 else itself


def from_float(value: Any, like: Any) -> Any:
    """A float32 as an element of the array `like`."""
    raise NotImplementedError


@overload(from_float)
def _from_float(value: Any, like: Any) -> Any:
    def bits(value: Any, like: Any) -> Any:
        return _narrow(np.float32(value))

    def itself(value: Any, like: Any) -> Any:
        return np.float32(value)

    return bits if like.dtype == types.uint16 else itself


@njit(inline="always", **FAST)
def matrix(address: int, rows: int, columns: int, like: np.ndarray) -> np.ndarray:
    """The matrix `[rows, columns]`, of `like`'s element type, at an address."""
    return carray(_pointer(address, like), (rows, columns))


@njit(inline="always", **FAST)
def vector(address: int, size: int, like: np.ndarray) -> np.ndarray:
    """The vector `[size]`, of `like`'s element type, at an address."""
    return carray(_pointer(address, like), (size,))


@njit(inline="always", **FAST)
def exponential(x: float) -> float:
    """e**x for x <= 0, in fp32 and without a call, so that loops over it are vectorised; 0 below -87."""
    clamped = max(x, np.float32(-87.0))
    n = np.floor(clamped * _LOG2E + np.float32(0.5))
    r = clamped - n * _LN2_HIGH - n * _LN2_LOW
    # Cephes' expf polynomial.
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    value = (p * r * r + r + np.float32(1.0)) * _power_of_two(np.int32(n))
    return np.float32(0.0) if x < np.float32(-87.0) else value


@njit(**FAST)
def _four_outputs(w_OI: np.ndarray, x_NI: np.ndarray, y_NO: np.ndarray, o: int, n: int, column: int) -> None:
    a = b = c = d = np.float32(0)
    for i in range(w_OI.shape[1]):
        x = x_NI[n, i]
        a += as_float(w_OI[o, i]) * x
        b += as_float(w_OI[o + 1, i]) * x
        c += as_float(w_OI[o + 2, i]) * x
        d += as_float(w_OI[o + 3, i]) * x
    y_NO[n, column + o] += a
    y_NO[n, column + o + 1] += b
    y_NO[n, column + o + 2] += c
    y_NO[n, column + o + 3] += d


@njit(**FAST)
def _two_outputs_of_four(w_OI: np.ndarray, x_NI: np.ndarray, y_NO: np.ndarray, o: int, n: int, column: int) -> None:
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
    for i in range(w_OI.shape[1]):
        a, b = as_float(w_OI[o, i]), as_float(w_OI[o + 1, i])
        a0 += a * x_NI[n, i]
        a1 += a * x_NI[n + 1, i]
        a2 += a * x_NI[n + 2, i]
        a3 += a * x_NI[n + 3, i]
        b0 += b * x_NI[n, i]
        b1 += b * x_NI[n + 1, i]
        b2 += b * x_NI[n + 2, i]
        b3 += b * x_NI[n + 3, i]
    o += column
    y_NO[n, o] += a0
    y_NO[n + 1, o] += a1
    y_NO[n + 2, o] += a2
    y_NO[n + 3, o] += a3
    y_NO[n, o + 1] += b0
    y_NO[n + 1, o + 1] += b1
    y_NO[n + 2, o + 1] += b2
    y_NO[n + 3, o + 1] += b3


@njit(**FAST)
def add_product(w_OI: np.ndarray, x_NI: np.ndarray, y_NO: np.ndarray, start: int, end: int, column: int) -> None:
    """y[start:end, column:column + O] += x[start:end] @ w.T, with x and y in fp32; w is read from memory once."""
    outputs, inputs = w_OI.shape
    for o in range(0, outputs - 3, 4):
        n = start
        while n + 4 <= end:
            _two_outputs_of_four(w_OI, x_NI, y_NO, o, n, column)
            _two_outputs_of_four(w_OI, x_NI, y_NO, o + 2, n, column)
            n += 4
        while n < end:
            _four_outputs(w_OI, x_NI, y_NO, o, n, column)
            n += 1
    for o in range(outputs - outputs % 4, outputs):
        for n in range(start, end):
            total = np.float32(0)
            for i in range(inputs):
                total += as_float(w_OI[o, i]) * x_NI[n, i]
            y_NO[n, column + o] += total


@njit(**FAST)
def add_expanded(
    b_RO: np.ndarray, h_NR: np.ndarray, y_NO: np.ndarray, start: int, end: int, offset: int, column: int
) -> None:
    """y[start:end, column:column + O] += h[start:end, offset:offset + R] @ b, four ranks at a time."""
    rank, outputs = b_RO.shape
    whole = rank - rank % 4
    for r in range(0, whole, 4):
        b0, b1, b2, b3 = b_RO[r], b_RO[r + 1], b_RO[r + 2], b_RO[r + 3]
        for n in range(start, end):
            h0, h1 = h_NR[n, offset + r], h_NR[n, offset + r + 1]
            h2, h3 = h_NR[n, offset + r + 2], h_NR[n, offset + r + 3]
            y_O = y_NO[n, column : column + outputs]
            for o in range(outputs):
                y_O[o] += as_float(b0[o]) * h0 + as_float(b1[o]) * h1 + as_float(b2[o]) * h2 + as_float(b3[o]) * h3
    for r in range(whole, rank):
        b0 = b_RO[r]
        for n in range(start, end):
            h0 = h_NR[n, offset + r]
            y_O = y_NO[n, column : column + outputs]
            for o in range(outputs):
                y_O[o] += as_float(b0[o]) * h0
