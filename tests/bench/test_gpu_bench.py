"""The benchmark of the Triton kernels: its checks and its measuring run on a CPU, and it says what it needs."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from bench import gpu

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
SMALL = {"qkv": gpu.Site(24, (16, 8, 8)), "down": gpu.Site(40, (24,))}
SWEEP = replace(
    gpu.FULL,
    models={"small": SMALL},
    kernel_models=("small",),
    batches=(1, 5),
    adapters=(1, 3),
    ranks=(4,),
    mixed_ranks=(1, 8),
    training_adapters=(2,),
    training_ranks=(4,),
    training_tokens=9,
    layers=1,
    copy_bytes=1024,
)


class Clock:
    """A CPU where every call takes a microsecond, and time for so many measurements."""

    device = torch.device("cpu")

    def __init__(self, measurements):
        self.left = measurements

    @property
    def over(self):
        return self.left <= 0

    def copies(self, moved):
        assert moved > 0
        return 2

    def seconds(self, calls):
        self.left -= 1
        for call in calls:
            call()
        return 1e-6


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "bench.gpu", *arguments], capture_output=True, text=True, timeout=120)


@needs_triton
def test_the_checks_pass_in_the_interpreter(tmp_path):
    done = run("--interpret", "--json", str(tmp_path / "gpu.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert {(row["shape"], row["dtype"]) for row in rows} == {
        (shape, dtype) for shape in ("decode", "long") for dtype in ("float32", "float16", "bfloat16")
    }
    assert all(0 < row[output] <= row["tolerance"] for row in rows for output in ("y", "dx", "gradients"))


@needs_triton
@pytest.mark.usefixtures("interpreted")
def test_every_kind_is_measured(capsys):
    import interpreter  # noqa: F401

    rows = gpu.measure(SWEEP, Clock(10**6))
    count = {what: sum(row["what"] == what for row in rows) for what in ("copy", "step", "training", "decode")}
    assert count == {"copy": 1, "step": 2, "training": 2 * 2, "decode": 2 * 2 * 3}
    assert rows[-1] == {"what": "left_out", "points": 0}
    assert gpu.ratios(rows).keys() == gpu.RATIOS.keys()
    assert gpu.ratios(rows)["step_over_base"] == 1.0
    shrink = next(row for row in rows if row.get("kernel") == "shrink" and row["batch"] == 1)
    moved = 2 * (4 * 24 * 3 + 24) + 4 * 4 * 3  # A and x in bf16, h in fp32
    assert shrink["gigabytes_per_second"] == pytest.approx(moved / 1e3)
    assert shrink["share_of_copy"] == pytest.approx(moved / 2048)
    shown = capsys.readouterr().out
    assert all(f"\n{what}\n" in shown for what in ("step", "training", "decode"))


@needs_triton
@pytest.mark.usefixtures("interpreted")
def test_what_there_is_no_time_for_is_counted(capsys):
    import interpreter  # noqa: F401

    rows = gpu.measure(SWEEP, Clock(3))  # the copy, and the three of one step
    assert [row["what"] for row in rows] == ["copy", "step", "left_out"]
    assert rows[-1]["points"] == 1 + 2 + 6
    assert gpu.ratios(rows).keys() == {"step_over_base", "step_over_torch"}
    assert "before 9 points were measured" in capsys.readouterr().out


def test_torch_computes_the_same_problem():
    from bench.lora_problems import Adapter, Problem
    from marlaas_kernels.reference import segment_lora
    from marlaas_kernels.segments import multi_lora_

    adapters = [Adapter(3, 4, gap=1, scale=0.5, targets=(True, True)), Adapter(2, 7, targets=(True, True))]
    p = Problem.random(adapters, 12, (9, 5), torch.float32, 16, padding=3)
    segments, buffers = gpu._in_torch(p)
    y = p.y_TO.clone()
    multi_lora_(y, p.x_TI, segments)
    torch.testing.assert_close(y, p.y_TO + segment_lora(p.x_TI, p.bank, p.table))
    assert [(a.shape[0], [b.shape for b in bs]) for a, bs in buffers] == [
        (8, [(9, 4), (5, 4)]),
        (14, [(9, 7), (5, 7)]),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_it_says_so():
    done = run("--quick")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "needs Triton" in done.stderr if find_spec("triton") is None else "needs a CUDA device" in done.stderr


def test_without_triton_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == 2
    assert capsys.readouterr().err == "bench.gpu needs Triton: pip install triton\n"
