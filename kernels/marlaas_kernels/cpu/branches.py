"""Attention of a training pass over stretches of tokens, each of which sees a shared prefix and itself, causally.

Nothing is computed for tokens that do not see each other. Queries are taken a block at a time, so that all products
are tiles; the weights are computed again for the gradient (Dao et al. 2022).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from marlaas_kernels.cpu.primitives import FAST, as_float, exponential, from_float
from marlaas_kernels.cpu.tiles import add_expanded, add_product
from marlaas_kernels.cpu.vocabulary import largest

QUERIES = 16


@njit(**FAST)
def _by_head(x_THD: np.ndarray) -> np.ndarray:
    """fp32 `[heads, T, D]`."""
    tokens, heads, dim = x_THD.shape
    out = np.empty((heads, tokens, dim), dtype=np.float32)
    for h in range(heads):
        for t in range(tokens):
            for d in range(dim):
                out[h, t, d] = as_float(x_THD[t, h, d])
    return out


@njit(**FAST)
def _write_back(x_HTD: np.ndarray, out_THD: np.ndarray) -> None:
    for t in range(out_THD.shape[0]):
        for h in range(out_THD.shape[1]):
            for d in range(out_THD.shape[2]):
                out_THD[t, h, d] = from_float(x_HTD[h, t, d], out_THD)


@njit(**FAST)
def _products(
    x_TD: np.ndarray, w_TD: np.ndarray, first: int, last: int, stretch: np.ndarray, out_NK: np.ndarray
) -> None:
    """out = x[first:last] @ w.T over the prefix and, behind it, the stretch up to `last`."""
    begin, _, prefix, prefix_end = stretch
    out_NK[:, : prefix_end - prefix + last - begin] = 0
    rows = x_TD[first:last]
    add_product(w_TD[prefix:prefix_end], rows, out_NK, 0, last - first, 0)
    add_product(w_TD[begin:last], rows, out_NK, 0, last - first, prefix_end - prefix)


@njit(**FAST)
def _sums(
    share_NK: np.ndarray, w_TD: np.ndarray, first: int, last: int, stretch: np.ndarray, out_ND: np.ndarray
) -> None:
    """out += shares @ w over the prefix and the stretch up to `last`."""
    begin, _, prefix, prefix_end = stretch
    add_expanded(w_TD[prefix:prefix_end], share_NK, out_ND, 0, last - first, 0, 0)
    add_expanded(w_TD[begin:last], share_NK, out_ND, 0, last - first, prefix_end - prefix, 0)


@njit(**FAST)
def _spread(
    share_NK: np.ndarray,
    x_TD: np.ndarray,
    first: int,
    last: int,
    stretch: np.ndarray,
    turned_KN: np.ndarray,
    out_TD: np.ndarray,
) -> None:
    """out[keys] += shares.T @ x[first:last]."""
    begin, _, prefix, prefix_end = stretch
    width, rows = prefix_end - prefix + last - begin, last - first
    for k in range(width):
        for n in range(rows):
            turned_KN[k, n] = share_NK[n, k]
    wide = prefix_end - prefix
    add_expanded(x_TD[first:last], turned_KN[:wide, :rows], out_TD[prefix:prefix_end], 0, wide, 0, 0)
    add_expanded(x_TD[first:last], turned_KN[wide:width, :rows], out_TD[begin:last], 0, last - begin, 0, 0)


@njit(**FAST)
def attend(
    query_THD: np.ndarray,
    key_TKD: np.ndarray,
    value_TKD: np.ndarray,
    stretches_S4: np.ndarray,
    out_THD: np.ndarray,
    logsum_HT: np.ndarray,
) -> None:
    """Softmax attention. stretches: int64 begin, end, and the begin and end of the prefix that it sees.

    out is written for tokens of stretches only. logsum: fp32, of the scaled scores.
    """
    heads, dim = query_THD.shape[1], query_THD.shape[2]
    group = heads // key_TKD.shape[1]
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    query, key, value = _by_head(query_THD), _by_head(key_TKD), _by_head(value_TKD)
    share = np.empty((QUERIES, query.shape[1]), dtype=np.float32)
    out = np.empty((QUERIES, dim), dtype=np.float32)
    for s in range(len(stretches_S4)):
        stretch = stretches_S4[s]
        begin, end, prefix, prefix_end = stretch
        for h in range(heads):
            for first in range(begin, end, QUERIES):
                last = min(first + QUERIES, end)
                _products(query[h], key[h // group], first, last, stretch, share)
                for n in range(last - first):
                    seen = prefix_end - prefix + first + n + 1 - begin
                    best, mass = largest(share[n, :seen]) * scale, np.float32(0)
                    for k in range(seen):
                        share[n, k] = exponential(share[n, k] * scale - best)
                        mass += share[n, k]
                    inverse = np.float32(1) / mass
                    for k in range(seen):
                        share[n, k] *= inverse
                    share[n, seen : seen + last - first] = 0
                    logsum_HT[h, first + n] = best + np.log(mass)
                out[:] = 0
                _sums(share, value[h // group], first, last, stretch, out)
                for n in range(last - first):
                    for d in range(dim):
                        out_THD[first + n, h, d] = from_float(out[n, d], out_THD)


@njit(**FAST)
def attend_backward(
    dout_THD: np.ndarray,
    query_THD: np.ndarray,
    key_TKD: np.ndarray,
    value_TKD: np.ndarray,
    out_THD: np.ndarray,
    logsum_HT: np.ndarray,
    stretches_S4: np.ndarray,
    dquery_THD: np.ndarray,
    dkey_TKD: np.ndarray,
    dvalue_TKD: np.ndarray,
) -> None:
    """The gradients of query, key and value, all tokens of them."""
    heads, dim = query_THD.shape[1], query_THD.shape[2]
    group = heads // key_TKD.shape[1]
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    query, key, value, dout = _by_head(query_THD), _by_head(key_TKD), _by_head(value_TKD), _by_head(dout_THD)
    dquery, dkey, dvalue = np.zeros_like(query), np.zeros_like(key), np.zeros_like(value)
    tokens = query.shape[1]
    share = np.empty((QUERIES, tokens), dtype=np.float32)
    slope = np.empty((QUERIES, tokens), dtype=np.float32)
    turned = np.empty((tokens, QUERIES), dtype=np.float32)
    for s in range(len(stretches_S4)):
        stretch = stretches_S4[s]
        begin, end, prefix, prefix_end = stretch
        for h in range(heads):
            k_TD, v_TD = key[h // group], value[h // group]
            for first in range(begin, end, QUERIES):
                last = min(first + QUERIES, end)
                _products(query[h], k_TD, first, last, stretch, share)
                _products(dout[h], v_TD, first, last, stretch, slope)
                for n in range(last - first):
                    t = first + n
                    seen = prefix_end - prefix + t + 1 - begin
                    delta = np.float32(0)
                    for d in range(dim):
                        delta += dout[h, t, d] * as_float(out_THD[t, h, d])
                    for k in range(seen):
                        share[n, k] = exponential(share[n, k] * scale - logsum_HT[h, t])
                        slope[n, k] = share[n, k] * (slope[n, k] - delta) * scale
                    share[n, seen : seen + last - first] = 0
                    slope[n, seen : seen + last - first] = 0
                _sums(slope, k_TD, first, last, stretch, dquery[h, first:last])
                _spread(slope, query[h], first, last, stretch, turned, dkey[h // group])
                _spread(share, dout[h], first, last, stretch, turned, dvalue[h // group])
    _write_back(dquery, dquery_THD)
    _write_back(dkey, dkey_TKD)
    _write_back(dvalue, dvalue_TKD)
