"""A decoder's layer between its matrix products: for passes of many tokens, whose products torch computes.

Each block is one call that holds no interpreter lock. `x` is what a linear layer was given and `y` what it made, both
in the model's type; the block adds the adapters and goes on in fp32.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from marlaas_kernels.cpu.attention import attend, rms_norm, silu_product, store
from marlaas_kernels.cpu.lora import add_lora
from marlaas_kernels.cpu.model import (
    ATTENTION_NORM,
    DOWN,
    GATE_UP,
    MLP_NORM,
    OUTPUT,
    QKV,
    Adapters,
    Weights,
    embed,
    rope_tables,
    turn_heads,
)
from marlaas_kernels.cpu.primitives import FAST, from_float, vector, widened
from marlaas_kernels.cpu.tiles import factor


@njit(**FAST)
def _round_into(x_I: np.ndarray, out_I: np.ndarray) -> None:
    for i in range(len(x_I)):
        out_I[i] = from_float(x_I[i], out_I)


@njit(**FAST)
def _with_adapters(
    weights: Weights, adapters: Adapters, layer: int, site: int, x_TI: np.ndarray, y_TO: np.ndarray
) -> np.ndarray:
    """fp32 `[T, O]`: y and the adapters' deltas."""
    wide = widened(y_TO)
    if len(adapters.segments_GK):
        shrunk = np.empty((x_TI.shape[0], adapters.widest), dtype=np.float32)
        sites_AS = adapters.sites_ALSF[:, layer, site]
        x = factor(x_TI, weights.like)
        add_lora(x, wide, shrunk, adapters.segments_GK, adapters.scale_G, sites_AS, weights.like)
    return wide


@njit(**FAST)
def _norm_into(weight_H: np.ndarray, epsilon: float, hidden_TH: np.ndarray, out_TH: np.ndarray) -> None:
    row_H = np.empty(hidden_TH.shape[1], dtype=np.float32)
    for t in range(hidden_TH.shape[0]):
        rms_norm(hidden_TH[t], weight_H, epsilon, row_H)
        _round_into(row_H, out_TH[t])


@njit(**FAST)
def begin(
    weights: Weights,
    tokens_T: np.ndarray,
    positions_T: np.ndarray,
    hidden_TH: np.ndarray,
    cos_TF: np.ndarray,
    sin_TF: np.ndarray,
    x_TH: np.ndarray,
) -> None:
    """From tokens to what the first layer's projections are given; fills the embeddings and the rotary tables."""
    rope_tables(weights, positions_T, cos_TF, sin_TF)
    embed(weights, tokens_T, hidden_TH)
    norm_H = vector(weights.norms_LN[0, ATTENTION_NORM], hidden_TH.shape[1], weights.like)
    _norm_into(norm_H, weights.epsilon, hidden_TH, x_TH)


@njit(**FAST)
def attention(
    weights: Weights,
    adapters: Adapters,
    layer: int,
    x_TI: np.ndarray,
    qkv_TO: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    positions_T: np.ndarray,
    rows_T: np.ndarray,
    cos_TF: np.ndarray,
    sin_TF: np.ndarray,
    out_TI: np.ndarray,
) -> None:
    """From queries, keys and values to what the output projection is given; fills the cache."""
    heads, kv_heads, dim = weights.heads, weights.kv_heads, weights.head_dim
    wide = _with_adapters(weights, adapters, layer, QKV, x_TI, qkv_TO)
    attended_HD = np.empty((heads, dim), dtype=np.float32)
    for t in range(len(positions_T)):
        qkv_HD = wide[t].reshape(heads + 2 * kv_heads, dim)
        turn_heads(weights, layer, qkv_HD, cos_TF[t], sin_TF[t])
        store(qkv_HD[heads : heads + kv_heads], keys[layer, rows_T[t]], positions_T[t])
        store(qkv_HD[heads + kv_heads :], values[layer, rows_T[t]], positions_T[t])
    for t in range(len(positions_T)):
        query_HD, row = wide[t].reshape(heads + 2 * kv_heads, dim)[:heads], rows_T[t]
        attend(query_HD, keys[layer, row], values[layer, row], positions_T[t] + 1, attended_HD)
        _round_into(attended_HD.reshape(heads * dim), out_TI[t])


@njit(**FAST)
def _add_to_residual(
    weights: Weights,
    adapters: Adapters,
    layer: int,
    site: int,
    x_TI: np.ndarray,
    y_TH: np.ndarray,
    hidden_TH: np.ndarray,
) -> None:
    wide = _with_adapters(weights, adapters, layer, site, x_TI, y_TH)
    for t in range(wide.shape[0]):
        for i in range(wide.shape[1]):
            hidden_TH[t, i] += wide[t, i]


@njit(**FAST)
def after_attention(
    weights: Weights,
    adapters: Adapters,
    layer: int,
    x_TI: np.ndarray,
    y_TH: np.ndarray,
    hidden_TH: np.ndarray,
    out_TH: np.ndarray,
) -> None:
    """Adds the output projection to the residual stream; out is what the gate and up projections are given."""
    _add_to_residual(weights, adapters, layer, OUTPUT, x_TI, y_TH, hidden_TH)
    norm_H = vector(weights.norms_LN[layer, MLP_NORM], hidden_TH.shape[1], weights.like)
    _norm_into(norm_H, weights.epsilon, hidden_TH, out_TH)


@njit(**FAST)
def activation(
    weights: Weights, adapters: Adapters, layer: int, x_TI: np.ndarray, gate_up_TO: np.ndarray, out_TI: np.ndarray
) -> None:
    """From gate and up to what the down projection is given."""
    wide = _with_adapters(weights, adapters, layer, GATE_UP, x_TI, gate_up_TO)
    size = out_TI.shape[1]
    row_I = np.empty(size, dtype=np.float32)
    for t in range(wide.shape[0]):
        silu_product(wide[t, :size], wide[t, size:], row_I)
        _round_into(row_I, out_TI[t])


@njit(**FAST)
def after_mlp(
    weights: Weights,
    adapters: Adapters,
    layer: int,
    x_TI: np.ndarray,
    y_TH: np.ndarray,
    hidden_TH: np.ndarray,
    out_TH: np.ndarray,
) -> None:
    """Adds the down projection to the residual stream; out is what the next layer, or the head, is given."""
    _add_to_residual(weights, adapters, layer, DOWN, x_TI, y_TH, hidden_TH)
    if layer + 1 < weights.norms_LN.shape[0]:
        norm_H = vector(weights.norms_LN[layer + 1, ATTENTION_NORM], hidden_TH.shape[1], weights.like)
        _norm_into(norm_H, weights.epsilon, hidden_TH, out_TH)
    else:
        _norm_into(weights.final_norm_H, weights.epsilon, hidden_TH, out_TH)
