"""The kernels compile for a CUDA device, which need not be there, and read memory in wide loads."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_for_cuda.py")
KERNELS = {"_shrink_kernel", "_expand_kernel", "_dh_kernel", "_dx_kernel", "_da_kernel", "_db_kernel"}


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(("shape", "dtype"), [("decode", "bfloat16"), ("long", "bfloat16"), ("long", "float32")])
def test_kernels_compile_once_and_load_sixteen_bytes_at_a_time(shape, dtype, tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    root = SCRIPT.parents[2]
    monkeypatch.setenv("PYTHONPATH", str(root), prepend=":")
    done = subprocess.run([sys.executable, SCRIPT, shape, dtype], capture_output=True, text=True, cwd=root, timeout=200)
    assert done.returncode == 0, done.stderr
    found = {name: (int(widest), int(times)) for name, widest, times in map(str.split, done.stdout.splitlines())}
    assert found == dict.fromkeys(KERNELS, (16, 1))
