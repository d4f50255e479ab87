"""Over the vocabulary: the draw of tokens, log-probs with entropy, and their gradient, each in a pass or two.

A row of logits stays in the processor's cache from its maximum to its result; nothing as large as the logits is made.
logits: `[N, V]`, fp32, or bfloat16 as uint16. inverse_N: one over the temperature, fp32. Blocks are summed in fp64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from marlaas_kernels.cpu.primitives import FAST, as_float, exponential, from_float

_BLOCK = 512
_INFINITY = np.int32(0x7F800000)


@intrinsic
def _bits(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@intrinsic
def _of_bits(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@njit(**FAST)
def largest(x_V: np.ndarray) -> float:
    """The maximum; NaN if any element is. Compares integers that order as the floats do, since those vectorise."""
    best, magnitude = np.int32(-0x7FFFFFFF), np.int32(0)
    for i in range(len(x_V)):
        bits = _bits(as_float(x_V[i]))
        best = max(best, np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))))
        magnitude = max(magnitude, np.int32(bits & np.int32(0x7FFFFFFF)))
    if magnitude > _INFINITY:
        return np.float32(np.nan)
    return _of_bits(np.int32(best ^ ((best >> np.int32(31)) & np.int32(0x7FFFFFFF))))


@njit(**FAST)
def _mass(x_V: np.ndarray, start: int, best: float, inverse: float) -> float:
    """The sum of exp((x - best) * inverse) over a block."""
    total = np.float32(0)
    for i in range(start, min(start + _BLOCK, len(x_V))):
        total += exponential((as_float(x_V[i]) - best) * inverse)
    return total


@njit(**FAST)
def draw(
    logits_NV: np.ndarray,
    inverse_N: np.ndarray,
    uniform_N: np.ndarray,
    token_N: np.ndarray,
    logprob_N: np.ndarray,
) -> None:
    """Tokens by inverse transform of one uniform in [0, 1) a row, and their log-probs."""
    size = logits_NV.shape[1]
    ends = np.empty((size + _BLOCK - 1) // _BLOCK, dtype=np.float64)
    for n in range(len(token_N)):
        x_V, inverse, total = logits_NV[n], inverse_N[n], 0.0
        best = largest(x_V)
        for b in range(len(ends)):
            total += _mass(x_V, b * _BLOCK, best, inverse)
            ends[b] = total
        target = uniform_N[n] * total
        b = 0
        while b < len(ends) - 1 and ends[b] <= target:
            b += 1
        reached = ends[b - 1] if b else 0.0
        # A rounding hair beyond the end lands on the last token that has any mass.
        chosen = b * _BLOCK
        for i in range(b * _BLOCK, min((b + 1) * _BLOCK, size)):
            own = exponential((as_float(x_V[i]) - best) * inverse)
            if own > 0:
                chosen = i
            reached += own
            if reached > target:
                break
        token_N[n] = chosen
        logprob_N[n] = (as_float(x_V[chosen]) - best) * inverse - np.log(total)


@njit(**FAST)
def greedy(logits_NV: np.ndarray, token_N: np.ndarray, logprob_N: np.ndarray) -> None:
    """The first of the likeliest tokens of each row, and its log-prob at temperature 1."""
    for n in range(len(token_N)):
        x_V, total, chosen = logits_NV[n], 0.0, 0
        best = largest(x_V)
        for start in range(0, len(x_V), _BLOCK):
            total += _mass(x_V, start, best, np.float32(1))
        while chosen < len(x_V) - 1 and as_float(x_V[chosen]) != best:
            chosen += 1
        token_N[n] = chosen
        logprob_N[n] = -np.log(total) + (best - best)


@njit(**FAST)
def logprobs(
    logits_NV: np.ndarray,
    inverse_N: np.ndarray,
    target_N: np.ndarray,
    logprob_N: np.ndarray,
    entropy_N: np.ndarray,
) -> None:
    """The log-prob of a given token of each row, and the entropy of the row's distribution."""
    for n in range(len(target_N)):
        x_V, inverse, total, weighted = logits_NV[n], inverse_N[n], 0.0, 0.0
        best = largest(x_V)
        for start in range(0, len(x_V), _BLOCK):
            mass, moment = np.float32(0), np.float32(0)
            for i in range(start, min(start + _BLOCK, len(x_V))):
                z = (as_float(x_V[i]) - best) * inverse
                own = exponential(z)
                mass += own
                moment += own * max(z, np.float32(-1e4))  # of -inf, whose share is 0
            total += mass
            weighted += moment
        logprob_N[n] = (as_float(x_V[target_N[n]]) - best) * inverse - np.log(total)
        entropy_N[n] = np.log(total) - weighted / total


@njit(**FAST)
def logprob_gradient_(
    logits_NV: np.ndarray, inverse_N: np.ndarray, target_N: np.ndarray, dlogprob_N: np.ndarray
) -> None:
    """Writes the gradient with respect to the logits over them: dlogprob * inverse * (one_hot(target) - probs)."""
    for n in range(len(target_N)):
        x_V, inverse, total = logits_NV[n], inverse_N[n], 0.0
        best = largest(x_V)
        for start in range(0, len(x_V), _BLOCK):
            total += _mass(x_V, start, best, inverse)
        weight = dlogprob_N[n] * inverse
        of_target = (as_float(x_V[target_N[n]]) - best) * inverse
        share = np.float32(-weight / total)
        for i in range(len(x_V)):
            x_V[i] = from_float(exponential((as_float(x_V[i]) - best) * inverse) * share, x_V)
        x_V[target_N[n]] = from_float(np.float32(weight * (1.0 - np.exp(of_target) / total)), x_V)
