"""A decoder's whole forward pass for a few tokens, in one call: what a pass costs is then reading the weights.

Passes of a few tokens are limited by memory and, with an operation a call, by the calls. Here the layers follow one
another in compiled code that holds no interpreter lock. Activations are fp32 throughout; keys and values are rounded
to the cache's type.
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
    norm_tokens,
    rope_tables,
    turn_heads,
)
from marlaas_kernels.cpu.primitives import FAST, as_float, matrix, vector
from marlaas_kernels.cpu.tiles import add_product, factor


@njit(**FAST)
def _linear(
    weights: Weights,
    adapters: Adapters,
    layer: int,
    site: int,
    x_TI: np.ndarray,
    y_TO: np.ndarray,
    h_TR: np.ndarray,
) -> None:
    """y += x @ w.T + bias + the tokens' adapters."""
    tokens, outputs = y_TO.shape
    like = weights.like
    x = factor(x_TI, like)
    add_product(matrix(weights.linears_LS[layer, site], outputs, x_TI.shape[1], like), x, y_TO, 0, tokens, 0)
    if weights.biases_LS[layer, site] != 0:
        bias_O = vector(weights.biases_LS[layer, site], outputs, like)
        for t in range(tokens):
            for o in range(outputs):
                y_TO[t, o] += as_float(bias_O[o])
    sites_AS = adapters.sites_ALSF[:, layer, site]
    add_lora(x, y_TO, h_TR, adapters.segments_GK, adapters.scale_G, sites_AS, like)


@njit(**FAST)
def forward(
    weights: Weights,
    adapters: Adapters,
    keys: np.ndarray,
    values: np.ndarray,
    tokens_T: np.ndarray,
    positions_T: np.ndarray,
    rows_T: np.ndarray,
    last_N: np.ndarray,
) -> np.ndarray:
    """Logits, fp32 `[N, vocabulary]`, of the tokens `last_N`.

    keys, values: the cache `[layers, rows, kv_heads, tokens, head_dim]`, which gets the tokens' own. tokens_T,
    positions_T, rows_T: int64; a row's tokens are in the order of their positions, and all earlier positions of the
    row are in the cache.
    """
    count, hidden_size, dim = len(tokens_T), weights.embedding_VH.shape[1], weights.head_dim
    heads, kv_heads, wide = weights.heads, weights.kv_heads, weights.intermediate
    hidden = np.empty((count, hidden_size), dtype=np.float32)
    x = np.empty((count, hidden_size), dtype=np.float32)
    qkv = np.empty((count, (heads + 2 * kv_heads) * dim), dtype=np.float32)
    attended = np.empty((count, heads * dim), dtype=np.float32)
    gate_up = np.empty((count, 2 * wide), dtype=np.float32)
    activated = np.empty((count, wide), dtype=np.float32)
    shrunk = np.empty((count, adapters.widest), dtype=np.float32)
    cos_TF = np.empty((count, dim // 2), dtype=np.float32)
    sin_TF = np.empty((count, dim // 2), dtype=np.float32)
    rope_tables(weights, positions_T, cos_TF, sin_TF)
    embed(weights, tokens_T, hidden)
    for layer in range(weights.linears_LS.shape[0]):
        norm_tokens(weights, layer, ATTENTION_NORM, hidden, x)
        qkv[:] = 0
        _linear(weights, adapters, layer, QKV, x, qkv, shrunk)
        for t in range(count):
            qkv_HD = qkv[t].reshape(heads + 2 * kv_heads, dim)
            turn_heads(weights, layer, qkv_HD, cos_TF[t], sin_TF[t])
            store(qkv_HD[heads : heads + kv_heads], keys[layer, rows_T[t]], positions_T[t])
            store(qkv_HD[heads + kv_heads :], values[layer, rows_T[t]], positions_T[t])
        for t in range(count):
            query_HD, row = qkv[t].reshape(heads + 2 * kv_heads, dim)[:heads], rows_T[t]
            out_HD = attended[t].reshape(heads, dim)
            attend(query_HD, keys[layer, row], values[layer, row], positions_T[t] + 1, out_HD)
        _linear(weights, adapters, layer, OUTPUT, attended, hidden, shrunk)
        norm_tokens(weights, layer, MLP_NORM, hidden, x)
        gate_up[:] = 0
        _linear(weights, adapters, layer, GATE_UP, x, gate_up, shrunk)
        for t in range(count):
            silu_product(gate_up[t, :wide], gate_up[t, wide:], activated[t])
        _linear(weights, adapters, layer, DOWN, activated, hidden, shrunk)

    final = np.empty((len(last_N), hidden_size), dtype=np.float32)
    for n in range(len(last_N)):
        rms_norm(hidden[last_N[n]], weights.final_norm_H, weights.epsilon, final[n])
    logits = np.zeros((len(last_N), weights.head_VH.shape[0]), dtype=np.float32)
    add_product(weights.head_VH, factor(final, weights.like), logits, 0, len(last_N), 0)
    return logits
