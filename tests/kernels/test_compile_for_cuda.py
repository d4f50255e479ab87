"""The kernels compile for a CUDA device, which need not be there, and read memory in wide loads."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_for_cuda.py")
SHARED = 99 * 1024  # bytes that a program may have on the consumer cards of every generation since Ampere
KERNELS = {"_shrink_kernel", "_expand_kernel", "_dh_kernel", "_dx_kernel", "_da_kernel", "_db_kernel"}


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    ("shape", "dtype", "capability"),
    [
        ("decode", "bfloat16", "90"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("long", "bfloat16", "90"), ("decode", "float32", "80"), ("long", "float32", "80")]
        ),
    ],
)
def test_kernels_compile_once_fit_and_load_sixteen_bytes_at_a_time(shape, dtype, capability, tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    root = SCRIPT.parents[2]
    monkeypatch.setenv("PYTHONPATH", str(root), prepend=":")
    command = [sys.executable, SCRIPT, shape, dtype, capability]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=200)
    assert done.returncode == 0, done.stderr
    found = {name: tuple(map(int, numbers)) for name, *numbers in map(str.split, done.stdout.splitlines())}
    assert {name: numbers[:2] for name, numbers in found.items()} == dict.fromkeys(KERNELS, (16, 1))
    assert max(shared for _, _, shared in found.values()) <= SHARED, found
