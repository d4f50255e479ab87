"""Pieces that the CPU kernels are made of: bfloat16 in registers, memory by address, the exponential.

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


@njit(**FAST)
def widened(x_TI: np.ndarray) -> np.ndarray:
    """A matrix's elements as fp32."""
    out = np.empty(x_TI.shape, dtype=np.float32)
    for t in range(x_TI.shape[0]):
        for i in range(x_TI.shape[1]):
            out[t, i] = as_float(x_TI[t, i])
    return out


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
    """e**x for x up to about 0, in fp32 and without a call, so that loops over it are vectorised; 0 below -87."""
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
