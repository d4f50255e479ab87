"""Multi-LoRA for tokens grouped by adapter: each adapter's matrices are read once, straight from where they lie."""

from __future__ import annotations

import numpy as np
from numba import njit

from marlaas_kernels.cpu.primitives import FAST, matrix
from marlaas_kernels.cpu.tiles import add_expanded, add_product

PARTS = 3  # of a fused linear, at most: q, k and v
SITE = 2 + 2 * PARTS  # int64s that describe an adapter at a fused linear: offset (-1: none), parts, (column, size)...


@njit(**FAST)
def add_lora(
    x_TI: np.ndarray,
    y_TO: np.ndarray,
    h_TR: np.ndarray,
    segments_GK: np.ndarray,
    scale_G: np.ndarray,
    sites_AS: np.ndarray,
    like: np.ndarray,
) -> None:
    """Adds each segment's delta to y; y and the work space h (parts * rank columns or more) are fp32, x is a `factor`.

    segments_GK: int64 `[G, 5]`: start, end, address of the adapter's vector, rank, row of sites_AS. sites_AS: int64
    `[adapters, SITE]`; the offset counts elements of `like`'s type from the vector's beginning.
    """
    inputs = x_TI.shape[1]
    for g in range(segments_GK.shape[0]):
        start, end, address, rank, adapter = segments_GK[g]
        offset, parts = sites_AS[adapter, 0], sites_AS[adapter, 1]
        if offset < 0:
            continue
        at = address + offset * like.itemsize
        h_TR[start:end, : parts * rank] = 0
        add_product(matrix(at, parts * rank, inputs, like), x_TI, h_TR, start, end, 0)
        h_TR[start:end, : parts * rank] *= scale_G[g]
        at += parts * rank * inputs * like.itemsize
        for part in range(parts):
            column, size = sites_AS[adapter, 2 + 2 * part], sites_AS[adapter, 3 + 2 * part]
            add_expanded(matrix(at, rank, size, like), h_TR, y_TO, start, end, part * rank, column)
            at += rank * size * like.itemsize
