"""What is between the matrix products of a training pass, forward and backward: norm, rotation, activation.

Tensors are `[T, ...]` in the model's type (bfloat16 as uint16, or float32); sums are fp32. Each call writes its results
into arrays that it is given.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from marlaas_kernels.cpu.primitives import FAST, as_float, exponential, from_float


@njit(**FAST)
def rms_norm(x_TH: np.ndarray, weight_H: np.ndarray, epsilon: float, out_TH: np.ndarray, factor_T: np.ndarray) -> None:
    """out = x * factor * weight, with factor = 1 / rms(x)."""
    size = x_TH.shape[1]
    for t in range(x_TH.shape[0]):
        total = np.float32(0)
        for i in range(size):
            value = as_float(x_TH[t, i])
            total += value * value
        factor = np.float32(1) / np.sqrt(total / np.float32(size) + np.float32(epsilon))
        factor_T[t] = factor
        for i in range(size):
            out_TH[t, i] = from_float(as_float(x_TH[t, i]) * factor * as_float(weight_H[i]), out_TH)


@njit(**FAST)
def rms_norm_backward(
    dy_TH: np.ndarray, x_TH: np.ndarray, weight_H: np.ndarray, factor_T: np.ndarray, dx_TH: np.ndarray
) -> None:
    """dx = factor * (w dy - x^ mean(w dy x^)), with x^ = x * factor."""
    size = x_TH.shape[1]
    for t in range(x_TH.shape[0]):
        factor, product = factor_T[t], np.float32(0)
        for i in range(size):
            product += as_float(dy_TH[t, i]) * as_float(weight_H[i]) * as_float(x_TH[t, i])
        share = product * factor * factor / np.float32(size)
        for i in range(size):
            scaled = as_float(dy_TH[t, i]) * as_float(weight_H[i])
            dx_TH[t, i] = from_float(factor * (scaled - as_float(x_TH[t, i]) * share), dx_TH)


@njit(**FAST)
def rotate_(x_THD: np.ndarray, heads: int, cos_TF: np.ndarray, sin_TF: np.ndarray, sign: float) -> None:
    """Rotary position embedding of the first heads, in place; sign -1 turns back, which is the gradient."""
    half, way = cos_TF.shape[1], np.float32(sign)
    for t in range(x_THD.shape[0]):
        for h in range(heads):
            for f in range(half):
                first, second = as_float(x_THD[t, h, f]), as_float(x_THD[t, h, half + f])
                cos, sin = cos_TF[t, f], sin_TF[t, f] * way
                x_THD[t, h, f] = from_float(first * cos - second * sin, x_THD)
                x_THD[t, h, half + f] = from_float(second * cos + first * sin, x_THD)


@njit(**FAST)
def silu_product(gate_up_TI: np.ndarray, out_TI: np.ndarray) -> None:
    """out = silu(gate) * up, gate and up being the halves of a row."""
    size = out_TI.shape[1]
    for t in range(out_TI.shape[0]):
        for i in range(size):
            gate, up = as_float(gate_up_TI[t, i]), as_float(gate_up_TI[t, size + i])
            small = exponential(-abs(gate))
            sigmoid = (np.float32(1) if gate >= 0 else small) / (np.float32(1) + small)
            out_TI[t, i] = from_float(gate * sigmoid * up, out_TI)


@njit(**FAST)
def silu_product_backward(dy_TI: np.ndarray, gate_up_TI: np.ndarray, d_TI: np.ndarray) -> None:
    """The gradient of both halves."""
    size = dy_TI.shape[1]
    for t in range(dy_TI.shape[0]):
        for i in range(size):
            gate, up, dy = as_float(gate_up_TI[t, i]), as_float(gate_up_TI[t, size + i]), as_float(dy_TI[t, i])
            small = exponential(-abs(gate))
            sigmoid = (np.float32(1) if gate >= 0 else small) / (np.float32(1) + small)
            slope = sigmoid * (np.float32(1) + gate * (np.float32(1) - sigmoid))
            d_TI[t, i] = from_float(dy * up * slope, d_TI)
        for i in range(size):
            gate, dy = as_float(gate_up_TI[t, i]), as_float(dy_TI[t, i])
            small = exponential(-abs(gate))
            sigmoid = (np.float32(1) if gate >= 0 else small) / (np.float32(1) + small)
            d_TI[t, size + i] = from_float(dy * gate * sigmoid, d_TI)
