"""Which accelerator the process uses, asked through torch.accelerator: CUDA, Ascend NPU, or the CPU."""

from __future__ import annotations

import ctypes
import sys

import torch

from marlaas.errors import ModelError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MMAP_BYTES = 2**30


def choose_device(wanted: str) -> torch.device:
    """The device of `auto`, `cpu`, `cuda[:n]` or `npu[:n]`.

    Raises ModelError when the device that was asked for is not there. `auto` falls back to the CPU.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    if wanted == "auto":
        _load_npu()
        found = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if found is None else torch.device(found.type, 0)
    if wanted.startswith("npu") and not _load_npu():
        raise ModelError(f"model.device: {wanted!r} needs torch_npu and CANN; install with: pip install 'marlaas[npu]'")
    device = torch.device(wanted)
    found = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if found is None or found.type != device.type else torch.accelerator.device_count()
    if (device.index or 0) >= count:
        raise ModelError(f"model.device: {wanted!r} is not there; this machine has {count} {device.type} device(s)")
    return torch.device(device.type, device.index or 0)


def _load_npu() -> bool:
    """Loads torch_npu where it works. It is found even where CANN is missing, and then fails on import."""
    try:
        import torch_npu  # noqa: F401
    except (ImportError, RuntimeError):
        return False
    return True


def reuse_freed_memory() -> None:
    """Has glibc keep what is freed instead of giving it back: a pass on the CPU takes and frees the same again.

    Its page faults were a sixth of a training pass. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if sys.platform == "linux" and mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
