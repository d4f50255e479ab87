"""Products of a few rows, a tile at a time: its sums stay in vector registers, and a weight is widened once a tile.

Numba's loops are left to LLVM to vectorise, which it does for one sum at a time. These are written in LLVM's vectors,
which it splits for processors with narrower ones. Weights are bfloat16 (as uint16) or float32; sums are fp32. Where
the processor multiplies pairs of bfloat16, which is twice as fast, both sides of a product are given to it as such.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from marlaas_kernels.cpu.primitives import FAST, as_float, from_float, widened

LANES = 16
_AHEAD = 2  # tiles; memory is read at its speed only if asked for early
_FLAGS = ("reassoc", "contract", "nsz", "arcp")
_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)
PAIRS = llvmlite.binding.get_host_cpu_features().get("avx512bf16", False)


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRED = ir.VectorType(_BFloat(), 2 * LANES)


def _constant(value: int) -> Any:
    return ir.Constant(_I64, value)


def _at(builder: Any, base: Any, index: Any, element: Any) -> Any:
    """The pointer to an element, from the base's address."""
    size = 2 if element == _I16 else 4
    return builder.inttoptr(builder.add(base, builder.mul(index, _constant(size))), ir.PointerType(element))


def _load(builder: Any, base: Any, index: Any, element: Any) -> Any:
    """LANES elements as fp32."""
    size = 2 if element == _I16 else 4
    of = ir.VectorType(element, LANES)
    pointer = builder.bitcast(_at(builder, base, index, element), ir.PointerType(of))
    value = builder.load(pointer, align=size, typ=of)
    return value if element == _F32 else _widen(builder, value, LANES)


def _load_one(builder: Any, base: Any, index: Any, element: Any) -> Any:
    value = builder.load(_at(builder, base, index, element), typ=element)
    return value if element == _F32 else _widen(builder, value, None)


def _widen(builder: Any, bits: Any, lanes: int | None) -> Any:
    word = _I32 if lanes is None else ir.VectorType(_I32, lanes)
    sixteen = ir.Constant(_I32, 16) if lanes is None else ir.Constant(word, [16] * lanes)
    shifted = builder.shl(builder.zext(bits, word), sixteen)
    return builder.bitcast(shifted, _F32 if lanes is None else _VECTOR)


def _prefetch(builder: Any, base: Any, index: Any, element: Any) -> None:
    """Asks for the cache line of an element that will be read once."""
    pointer = _at(builder, base, index, element)
    of_type = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(builder.module, of_type, "llvm.prefetch.p0")
    builder.call(prefetch, [pointer, *(ir.Constant(_I32, flag) for flag in (0, 1, 1))])


def _splat(builder: Any, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))


def _add_product(builder: Any, total: Any, a: Any, b: Any) -> None:
    """total, in memory that becomes a register, += a * b."""
    product = builder.fmul(a, b, flags=_FLAGS)
    builder.store(builder.fadd(builder.load(total, typ=product.type), product, flags=_FLAGS), total)


def _load_pairs(builder: Any, base: Any, index: Any) -> Any:
    """2 * LANES bfloat16s."""
    pointer = builder.bitcast(_at(builder, base, index, _I16), ir.PointerType(ir.VectorType(_I32, LANES)))
    return builder.bitcast(builder.load(pointer, align=2, typ=ir.VectorType(_I32, LANES)), _PAIRED)


def _add_paired_product(builder: Any, total: Any, a: Any, b: Any) -> None:
    """total[l] += a[2l] * b[2l] + a[2l + 1] * b[2l + 1]."""
    of_type = ir.FunctionType(_VECTOR, [_VECTOR, _PAIRED, _PAIRED])
    product = cgutils.get_or_insert_function(builder.module, of_type, "llvm.x86.avx512bf16.dpbf16ps.512")
    builder.store(builder.call(product, [builder.load(total, typ=_VECTOR), a, b]), total)


def _sum(builder: Any, vector: Any) -> Any:
    """The sum of the lanes, by halves."""
    size = LANES
    while size > 1:
        size //= 2
        low, high = (
            builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_I32, size), list(range(at, at + size))))
            for at in (0, size)
        )
        vector = builder.fadd(low, high, flags=_FLAGS)
    return builder.extract_element(vector, ir.Constant(_I32, 0))


def _call(builder: Any, name: str, args: Sequence[Any], body: Callable[..., None]) -> None:
    """Calls a function of int64s, made at the module's first call.

    Inlined into a large function, the inner loops would lose registers to what is around them.
    """
    module = builder.module
    function = module.globals.get(name)
    if function is None:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * len(args)), name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        inside = ir.IRBuilder(function.append_basic_block("entry"))
        body(inside, *function.args)
        inside.ret_void()
    builder.call(function, args)


def _element(like: Any) -> Any:
    return _I16 if like.dtype == types.uint16 else _F32


def _dot_tile(outputs: int, rows: int) -> Any:
    """y[n, o] += sum over i of w[o, i] * x[n, i], for o < outputs and n < rows; strides are in elements."""

    @intrinsic
    def tile(
        typingctx: Any, w: Any, x: Any, x_stride: Any, y: Any, y_stride: Any, inputs: Any, like: Any, x_like: Any
    ) -> Any:
        element, x_element = _element(like), _element(x_like)
        paired = element == x_element == _I16
        assert paired or x_element == _F32, "an x of bfloat16 needs weights of it, and a processor that pairs"
        step = 2 * LANES if paired else LANES

        def body(builder: Any, w: Any, x: Any, x_stride: Any, y: Any, y_stride: Any, inputs: Any) -> None:
            vectors = {(o, n): cgutils.alloca_once(builder, _VECTOR) for o in range(outputs) for n in range(rows)}
            for total in vectors.values():
                builder.store(ir.Constant(_VECTOR, [0.0] * LANES), total)
            w_rows = [builder.mul(inputs, _constant(o)) for o in range(outputs)]
            ahead = builder.mul(inputs, _constant(_AHEAD * outputs))
            x_rows = [builder.mul(x_stride, _constant(n)) for n in range(rows)]
            whole = builder.sub(inputs, builder.urem(inputs, _constant(step)))
            with cgutils.for_range_slice(builder, _constant(0), whole, _constant(step), intp=_I64) as (i, _):
                w_at, x_at = ([builder.add(row, i) for row in rows_] for rows_ in (w_rows, x_rows))
                for at in w_at:
                    _prefetch(builder, w, builder.add(at, ahead), element)
                if paired:
                    ws, xs = ([_load_pairs(builder, base, at) for at in ats] for base, ats in ((w, w_at), (x, x_at)))
                else:
                    ws = [_load(builder, w, at, element) for at in w_at]
                    xs = [_load(builder, x, at, _F32) for at in x_at]
                for (o, n), total in vectors.items():
                    (_add_paired_product if paired else _add_product)(builder, total, ws[o], xs[n])
            sums = {key: cgutils.alloca_once(builder, _F32) for key in vectors}
            for key, total in vectors.items():
                builder.store(_sum(builder, builder.load(total, typ=_VECTOR)), sums[key])
            with cgutils.for_range_slice(builder, whole, inputs, _constant(1), intp=_I64) as (i, _):
                ws = [_load_one(builder, w, builder.add(row, i), element) for row in w_rows]
                xs = [_load_one(builder, x, builder.add(row, i), x_element) for row in x_rows]
                for (o, n), total in sums.items():
                    _add_product(builder, total, ws[o], xs[n])
            for (o, n), total in sums.items():
                place = _at(builder, y, builder.add(builder.mul(y_stride, _constant(n)), _constant(o)), _F32)
                value = builder.fadd(builder.load(place, typ=_F32), builder.load(total, typ=_F32), flags=_FLAGS)
                builder.store(value, place)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _call(builder, f"marlaas_dot_{outputs}x{rows}_{element}_{x_element}", args[:-2], body)
            return context.get_dummy_value()

        return types.void(w, x, x_stride, y, y_stride, inputs, like, x_like), codegen

    return tile


def _expand_tile(vectors: int, rows: int) -> Any:
    """y[n, :LANES * vectors] += sum over r of h[n, r] * b[r, :], for n < rows; strides are in elements."""

    @intrinsic
    def tile(
        typingctx: Any, b: Any, b_stride: Any, h: Any, h_stride: Any, y: Any, y_stride: Any, rank: Any, like: Any
    ) -> Any:
        element = _element(like)

        def body(builder: Any, b: Any, b_stride: Any, h: Any, h_stride: Any, y: Any, y_stride: Any, rank: Any) -> None:
            totals = {(n, v): cgutils.alloca_once(builder, _VECTOR) for n in range(rows) for v in range(vectors)}
            y_rows = [builder.mul(y_stride, _constant(n)) for n in range(rows)]
            places = {(n, v): builder.add(y_rows[n], _constant(v * LANES)) for n, v in totals}
            for key, total in totals.items():
                builder.store(_load(builder, y, places[key], _F32), total)
            with cgutils.for_range_slice(builder, _constant(0), rank, _constant(1), intp=_I64) as (r, _):
                row = builder.mul(b_stride, r)
                bs = [_load(builder, b, builder.add(row, _constant(v * LANES)), element) for v in range(vectors)]
                for v in range(0, vectors, 2):
                    _prefetch(builder, b, builder.add(row, _constant((vectors + v) * LANES)), element)
                for n in range(rows):
                    at = builder.add(builder.mul(h_stride, _constant(n)), r)
                    share = _splat(builder, _load_one(builder, h, at, _F32))
                    for v in range(vectors):
                        _add_product(builder, totals[n, v], bs[v], share)
            for key, total in totals.items():
                pointer = builder.bitcast(_at(builder, y, places[key], _F32), ir.PointerType(_VECTOR))
                builder.store(builder.load(total, typ=_VECTOR), pointer, align=4)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _call(builder, f"marlaas_expand_{vectors}x{rows}_{element}", args[:-1], body)
            return context.get_dummy_value()

        return types.void(b, b_stride, h, h_stride, y, y_stride, rank, like), codegen

    return tile


@intrinsic
def address(typingctx: Any, array: Any) -> Any:
    """Where an array's data begins, int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, _I64)

    return types.int64(array), codegen


_dot_4x4, _dot_4x2, _dot_4x1, _dot_1x1 = _dot_tile(4, 4), _dot_tile(4, 2), _dot_tile(4, 1), _dot_tile(1, 1)
_expand_4x4, _expand_4x1 = _expand_tile(4, 4), _expand_tile(4, 1)
_expand_1x4, _expand_1x1 = _expand_tile(1, 4), _expand_tile(1, 1)


def factor(x_TI: Any, like: Any) -> Any:
    """x as `add_product` takes it beside weights of `like`'s type: in bfloat16 where that is faster, else in fp32."""
    raise NotImplementedError


@overload(factor)
def _factor(x_TI: Any, like: Any) -> Any:
    def itself(x_TI: Any, like: Any) -> Any:
        return x_TI

    def wide(x_TI: Any, like: Any) -> Any:
        return widened(x_TI)

    def rounded(x_TI: Any, like: Any) -> Any:
        out = np.empty(x_TI.shape, dtype=np.uint16)
        for t in range(x_TI.shape[0]):
            for i in range(x_TI.shape[1]):
                out[t, i] = from_float(x_TI[t, i], out)
        return out

    pairs = PAIRS and like.dtype == types.uint16
    if x_TI.dtype == types.float32:
        return rounded if pairs else itself
    return itself if pairs else wide


@njit(**FAST)
def add_product(w_OI: np.ndarray, x_NI: np.ndarray, y_NO: np.ndarray, start: int, end: int, column: int) -> None:
    """y[start:end, column:column + O] += x[start:end] @ w.T, with y in fp32; w is read from memory once.

    x is fp32, or what `factor` made of it. The last dimension of each is contiguous, and w's rows are.
    """
    outputs, inputs = w_OI.shape
    x_stride, y_stride = x_NI.strides[0] // x_NI.itemsize, y_NO.strides[0] // 4
    w_row, x_row, y_row = inputs * w_OI.itemsize, x_NI.strides[0], y_NO.strides[0]
    w, x, y = address(w_OI), address(x_NI), address(y_NO) + 4 * column
    for o in range(0, outputs - 3, 4):
        at, n = w + o * w_row, start
        while n + 4 <= end:
            _dot_4x4(at, x + n * x_row, x_stride, y + n * y_row + 4 * o, y_stride, inputs, w_OI, x_NI)
            n += 4
        if n + 2 <= end:
            _dot_4x2(at, x + n * x_row, x_stride, y + n * y_row + 4 * o, y_stride, inputs, w_OI, x_NI)
            n += 2
        if n < end:
            _dot_4x1(at, x + n * x_row, x_stride, y + n * y_row + 4 * o, y_stride, inputs, w_OI, x_NI)
    for o in range(outputs - outputs % 4, outputs):
        for n in range(start, end):
            _dot_1x1(w + o * w_row, x + n * x_row, x_stride, y + n * y_row + 4 * o, y_stride, inputs, w_OI, x_NI)


@njit(**FAST)
def add_expanded(
    b_RO: np.ndarray, h_NR: np.ndarray, y_NO: np.ndarray, start: int, end: int, offset: int, column: int
) -> None:
    """y[start:end, column:column + O] += h[start:end, offset:offset + R] @ b; the same is contiguous."""
    rank, outputs = b_RO.shape
    h_stride, y_stride = h_NR.strides[0] // 4, y_NO.strides[0] // 4
    b, h, y = address(b_RO), address(h_NR) + 4 * offset, address(y_NO) + 4 * column
    wide, whole = outputs - outputs % (4 * LANES), outputs - outputs % LANES
    n = start
    while n < end:
        h_n, y_n = h + n * h_NR.strides[0], y + n * y_NO.strides[0]
        if n + 4 <= end:
            for o in range(0, wide, 4 * LANES):
                _expand_4x4(b + o * b_RO.itemsize, outputs, h_n, h_stride, y_n + 4 * o, y_stride, rank, b_RO)
            for o in range(wide, whole, LANES):
                _expand_1x4(b + o * b_RO.itemsize, outputs, h_n, h_stride, y_n + 4 * o, y_stride, rank, b_RO)
            n += 4
        else:
            for o in range(0, wide, 4 * LANES):
                _expand_4x1(b + o * b_RO.itemsize, outputs, h_n, h_stride, y_n + 4 * o, y_stride, rank, b_RO)
            for o in range(wide, whole, LANES):
                _expand_1x1(b + o * b_RO.itemsize, outputs, h_n, h_stride, y_n + 4 * o, y_stride, rank, b_RO)
            n += 1
    for n in range(start, end):
        for o in range(whole, outputs):
            total = np.float32(0)
            for r in range(rank):
                total += h_NR[n, offset + r] * as_float(b_RO[r, o])
            y_NO[n, column + o] += total
