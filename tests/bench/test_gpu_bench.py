"""The benchmark of the Triton kernels: its checks run on a CPU, and it says what it needs."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "bench.gpu", *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_checks_pass_in_the_interpreter(tmp_path):
    done = run("--interpret", "--json", str(tmp_path / "gpu.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert {(row["shape"], row["dtype"]) for row in rows} == {
        (shape, dtype) for shape in ("decode", "long") for dtype in ("float32", "float16", "bfloat16")
    }
    assert all(0 < row[output] <= row["tolerance"] for row in rows for output in ("y", "dx", "gradients"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_it_says_so():
    done = run("--quick")
    assert done.returncode == 2
    assert "needs a CUDA device" in done.stderr
