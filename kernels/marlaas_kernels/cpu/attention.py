"""What happens to a token between the linear layers; attention goes to the cache, up to the token's own position."""

from __future__ import annotations

import numpy as np
from numba import njit

from marlaas_kernels.cpu.primitives import FAST, as_float, exponential, from_float
from marlaas_kernels.cpu.vocabulary import largest


@njit(**FAST)
def rotate(x_D: np.ndarray, cos_F: np.ndarray, sin_F: np.ndarray) -> None:
    """Rotary position embedding in place, half-split form (Su et al. 2021, as in Llama)."""
    half = len(cos_F)
    for f in range(half):
        first, second = x_D[f], x_D[half + f]
        x_D[f] = first * cos_F[f] - second * sin_F[f]
        x_D[half + f] = second * cos_F[f] + first * sin_F[f]


@njit(**FAST)
def rms_norm(x_I: np.ndarray, weight_I: np.ndarray, epsilon: float, out_I: np.ndarray) -> None:
    """out = x / rms(x) * weight (Zhang and Sennrich 2019); x and out are fp32 and may be one."""
    total = np.float32(0)
    for i in range(len(x_I)):
        total += x_I[i] * x_I[i]
    factor = np.float32(1) / np.sqrt(total / np.float32(len(x_I)) + epsilon)
    for i in range(len(x_I)):
        out_I[i] = x_I[i] * factor * as_float(weight_I[i])


@njit(**FAST)
def silu_product(gate_I: np.ndarray, up_I: np.ndarray, out_I: np.ndarray) -> None:
    """out = silu(gate) * up, all fp32."""
    for i in range(len(out_I)):
        gate = gate_I[i]
        small = exponential(-abs(gate))  # the sigmoid from an exponential that cannot overflow
        out_I[i] = gate * (np.float32(1) if gate >= 0 else small) / (np.float32(1) + small) * up_I[i]


@njit(**FAST)
def store(x_KD: np.ndarray, cache_KTD: np.ndarray, position: int) -> None:
    """Writes a token's fp32 `[kv_heads, D]` into a row of the cache, rounded to its type."""
    for k in range(x_KD.shape[0]):
        for d in range(x_KD.shape[1]):
            cache_KTD[k, position, d] = from_float(x_KD[k, d], cache_KTD)


@njit(**FAST)
def _scores(query_D: np.ndarray, keys_TD: np.ndarray, length: int, scale: float, out_T: np.ndarray) -> None:
    """Scaled products with the first `length` keys, four at a time."""
    dim = len(query_D)
    whole = length - length % 4
    for t in range(0, whole, 4):
        a = b = c = d = np.float32(0)
        for i in range(dim):
            q = query_D[i]
            a += q * as_float(keys_TD[t, i])
            b += q * as_float(keys_TD[t + 1, i])
            c += q * as_float(keys_TD[t + 2, i])
            d += q * as_float(keys_TD[t + 3, i])
        out_T[t] = a * scale
        out_T[t + 1] = b * scale
        out_T[t + 2] = c * scale
        out_T[t + 3] = d * scale
    for t in range(whole, length):
        total = np.float32(0)
        for i in range(dim):
            total += query_D[i] * as_float(keys_TD[t, i])
        out_T[t] = total * scale


@njit(**FAST)
def _mix(weight_T: np.ndarray, values_TD: np.ndarray, length: int, out_D: np.ndarray) -> None:
    """The weighted sum of the first `length` values, four at a time."""
    dim = len(out_D)
    whole = length - length % 4
    out_D[:] = 0
    for t in range(0, whole, 4):
        a, b, c, d = weight_T[t], weight_T[t + 1], weight_T[t + 2], weight_T[t + 3]
        for i in range(dim):
            out_D[i] += (
                a * as_float(values_TD[t, i])
                + b * as_float(values_TD[t + 1, i])
                + c * as_float(values_TD[t + 2, i])
                + d * as_float(values_TD[t + 3, i])
            )
    for t in range(whole, length):
        for i in range(dim):
            out_D[i] += weight_T[t] * as_float(values_TD[t, i])


@njit(**FAST)
def attend(query_HD: np.ndarray, keys_KTD: np.ndarray, values_KTD: np.ndarray, length: int, out_HD: np.ndarray) -> None:
    """Softmax attention of one token's fp32 queries to the first `length` positions of a cache row."""
    heads, dim = query_HD.shape
    group = heads // keys_KTD.shape[0]
    weight_T = np.empty(length, dtype=np.float32)
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    for h in range(heads):
        _scores(query_HD[h], keys_KTD[h // group], length, scale, weight_T)
        best = largest(weight_T)
        mass = np.float32(0)
        for t in range(length):
            weight_T[t] = exponential(weight_T[t] - best)
            mass += weight_T[t]
        for t in range(length):
            weight_T[t] /= mass
        _mix(weight_T, values_KTD[h // group], length, out_HD[h])
