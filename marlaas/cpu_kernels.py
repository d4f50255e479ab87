"""Where the kernels for processors run, and tensors as they take them."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch

_DTYPES = (torch.bfloat16, torch.float32)


@cache
def _numba_is_installed() -> bool:
    return importlib.util.find_spec("numba") is not None


def runs_here(device: torch.device, dtype: torch.dtype) -> bool:
    """False on accelerators, for other dtypes than bf16 and fp32, and without Numba: then torch computes everything."""
    return device.type == "cpu" and dtype in _DTYPES and _numba_is_installed()


def as_array(tensor: torch.Tensor) -> Any:
    """The memory of a contiguous tensor as a numpy array; bfloat16 as uint16."""
    assert tensor.is_contiguous() or tensor.numel() == 0
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
