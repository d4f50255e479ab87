"""What the machine can do at most, measured in the run that is compared with it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_READ_BYTES = 2**30  # far beyond the caches
_SIDE = 2048
_RUNS = 5


def read_bandwidth(size: int = _READ_BYTES) -> float:
    """Bytes a second of a read by torch's threads, at its best: the sum of a vector of so many bytes."""
    vector = torch.ones(size // 4)
    return vector.nbytes / min(seconds(vector.sum) for _ in range(_RUNS))


def matmul_rate(dtype: torch.dtype, side: int = _SIDE) -> float:
    """Operations a second of the product of two square matrices, at its best; a product and its addition are two."""
    left, right = (torch.ones(side, side, dtype=dtype) for _ in range(2))
    left @ right  # the first product prepares
    return 2 * side**3 / min(seconds(lambda: left @ right) for _ in range(_RUNS))


def seconds(work: Callable[[], object]) -> float:
    """How long a call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
