"""What the CPU kernels know of a base model and of a pass's adapters, and the parts of a layer that they share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from marlaas_kernels.cpu.attention import rms_norm, rotate
from marlaas_kernels.cpu.primitives import FAST, as_float, from_float, vector

QKV, OUTPUT, GATE_UP, DOWN = range(4)
ATTENTION_NORM, MLP_NORM, QUERY_NORM, KEY_NORM = range(4)


class Weights(NamedTuple):
    """The base model. Addresses are int64 and of `like`'s element type; 0 where a layer has no such tensor.

    linears_LS: `[layers, 4]` weights `[out, in]`; biases_LS: the same; norms_LN: `[layers, 4]`: attention, mlp,
    query, key. embedding_VH and head_VH: matrices; final_norm_H.
    """

    linears_LS: np.ndarray
    biases_LS: np.ndarray
    norms_LN: np.ndarray
    embedding_VH: np.ndarray
    head_VH: np.ndarray
    final_norm_H: np.ndarray
    inverse_frequency_F: np.ndarray
    rope_scale: np.float32
    epsilon: np.float32
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    like: np.ndarray


class Adapters(NamedTuple):
    """Which tokens have which adapter; see `add_lora`. sites_ALSF: int64 `[adapters, layers, 4, SITE]`."""

    segments_GK: np.ndarray
    scale_G: np.ndarray
    sites_ALSF: np.ndarray
    widest: int


@njit(**FAST)
def embed(weights: Weights, tokens_T: np.ndarray, hidden_TH: np.ndarray) -> None:
    """Fills the fp32 embeddings of the tokens."""
    for t in range(len(tokens_T)):
        for i in range(hidden_TH.shape[1]):
            hidden_TH[t, i] = as_float(weights.embedding_VH[tokens_T[t], i])


@njit(**FAST)
def rope_tables(weights: Weights, positions_T: np.ndarray, cos_TF: np.ndarray, sin_TF: np.ndarray) -> None:
    """Fills the cosines and sines of the positions, fp32 `[T, head_dim / 2]`, rounded to the model's type."""
    for t in range(len(positions_T)):
        for f in range(cos_TF.shape[1]):
            angle = np.float32(positions_T[t]) * weights.inverse_frequency_F[f]
            cos_TF[t, f] = as_float(from_float(np.cos(angle) * weights.rope_scale, weights.like))
            sin_TF[t, f] = as_float(from_float(np.sin(angle) * weights.rope_scale, weights.like))


@njit(**FAST)
def turn_heads(weights: Weights, layer: int, qkv_HD: np.ndarray, cos_F: np.ndarray, sin_F: np.ndarray) -> None:
    """Norms (where the model has them) and rotates a token's queries and keys, in place."""
    for h in range(weights.heads + weights.kv_heads):
        norm = weights.norms_LN[layer, QUERY_NORM if h < weights.heads else KEY_NORM]
        if norm != 0:
            rms_norm(qkv_HD[h], vector(norm, weights.head_dim, weights.like), weights.epsilon, qkv_HD[h])
        rotate(qkv_HD[h], cos_F, sin_F)


@njit(**FAST)
def norm_tokens(weights: Weights, layer: int, which: int, x_TH: np.ndarray, out_TH: np.ndarray) -> None:
    """A layer's norm of every token, fp32."""
    weight_H = vector(weights.norms_LN[layer, which], x_TH.shape[1], weights.like)
    for t in range(x_TH.shape[0]):
        rms_norm(x_TH[t], weight_H, weights.epsilon, out_TH[t])
