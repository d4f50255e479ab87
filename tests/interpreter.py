"""Triton's interpreter. Importing this makes it this process's Triton, or skips the module where Triton is missing."""

import sys
from importlib.util import find_spec

import pytest

if find_spec("triton") is None:
    pytest.skip("triton is not installed: pip install triton", allow_module_level=True)

if "marlaas_kernels.triton.op" not in sys.modules:
    assert "triton" not in sys.modules, "triton was imported before its interpreter could be chosen"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")  # read when a kernel is defined, Triton's own among them
        import marlaas_kernels.triton.op  # noqa: F401
