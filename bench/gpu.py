"""The Triton kernels on a CUDA device: right, and how fast against what the device can do. Needs torch and triton only.

PYTHONPATH=kernels python -m bench.gpu [--quick] [--minutes 5] [--json PATH]
PYTHONPATH=kernels python -m bench.gpu --interpret     (checks alone, on a CPU, in Triton's interpreter)

Exits 1 if a kernel is wrong and 2 without a CUDA device or Triton. Times are those of a CUDA graph that goes through
copies of the adapters until they no longer fit the device's cache, as the layers of a model do. What is left when the
minutes are over is not measured, and counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from bench.lora_problems import TOLERANCE, Adapter, Problem
from marlaas_kernels.segments import SegmentWeights, multi_lora_, multi_lora_backward
from marlaas_kernels.triton.config import Shape, Tiles, tiles_of

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Site:
    """A fused linear's inputs and the outputs of its parts."""

    inputs: int
    sizes: tuple[int, ...]


def _layer(hidden: int, key_value: int, feed_forward: int) -> dict[str, Site]:
    return {
        "qkv": Site(hidden, (hidden, key_value, key_value)),
        "output": Site(hidden, (hidden,)),
        "gate_up": Site(hidden, (feed_forward, feed_forward)),
        "down": Site(feed_forward, (hidden,)),
    }


MODELS = {"1B": _layer(2048, 512, 8192), "3B": _layer(3072, 1024, 8192), "7B": _layer(4096, 1024, 14336)}
COLUMNS = {
    "check": "shape dtype inputs parts y dx gradients tolerance",
    "step": "model batch adapters base_microseconds microseconds over_base torch_microseconds over_torch",
    "training": "model site adapters rank kernel microseconds teraflops over_base over_torch",
    "decode": "model site batch adapters rank kernel microseconds gigabytes_per_second share_of_copy",
}
RATIOS = {
    "step_over_base": ("step", "over_base"),
    "step_over_torch": ("step", "over_torch"),
    "training_over_base": ("training", "over_base"),
    "training_over_torch": ("training", "over_torch"),
    "decode_share_of_copy": ("decode", "share_of_copy"),
}


@dataclass(frozen=True)
class Sweep:
    """What is measured. models: those of decode steps; kernel_models and sites: of single fused linears.

    mixed_ranks: of a decode step's adapters, in turn; layers: how many a decode step has, so that the weights are not
    in the cache when their turn comes again.
    """

    models: Mapping[str, Mapping[str, Site]]
    kernel_models: tuple[str, ...]
    sites: tuple[str, ...]
    batches: tuple[int, ...]
    adapters: tuple[int, ...]
    ranks: tuple[int, ...]
    mixed_ranks: tuple[int, ...]
    training_adapters: tuple[int, ...]
    training_ranks: tuple[int, ...]
    training_tokens: int
    layers: int
    copy_bytes: int


FULL = Sweep(
    models=MODELS,
    kernel_models=("1B", "7B"),
    sites=("qkv", "down"),
    batches=(1, 8, 32, 128, 256),
    adapters=(1, 8, 32),
    ranks=(8, 16, 64),
    mixed_ranks=(8, 16, 32, 64),
    training_adapters=(1, 4, 16),
    training_ranks=(16, 64),
    training_tokens=8192,
    layers=4,
    copy_bytes=2**30,
)
QUICK = replace(FULL, models={"7B": MODELS["7B"]}, kernel_models=("7B",), sites=("qkv",), batches=(1, 32, 256))


class Meter(Protocol):
    """The device that is measured, and its clock."""

    device: torch.device

    @property
    def over(self) -> bool:
        """Whether the time for measuring is over."""

    def seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """Median seconds of a call."""

    def copies(self, moved: int) -> int:
        """How many copies of so many bytes do not fit the device's cache together."""


class CudaMeter:
    """Times CUDA graphs, for so many minutes."""

    device = torch.device("cuda")

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    @property
    def over(self) -> bool:
        return time.monotonic() > self._end

    def copies(self, moved: int) -> int:
        return min(64, 4 * torch.cuda.get_device_properties().L2_cache_size // moved + 2)

    def seconds(self, calls: Sequence[Callable[[], object]], repeats: int = 15) -> float:
        """All calls are in one graph; a single one is captured ten times."""
        calls = list(calls) * (10 if len(calls) == 1 else 1)
        calls[0]()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / len(calls))
        return median(times[3:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer points")
    parser.add_argument("--minutes", type=float, default=4.5, help="for checks and timings; default 4.5")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--interpret", action="store_true", help="check only, on a CPU, in Triton's interpreter")
    arguments = parser.parse_args()
    missing = _missing(arguments.interpret)
    if missing:
        print(f"bench.gpu needs {missing}", file=sys.stderr)
        return 2
    if arguments.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    meter = CudaMeter(arguments.minutes)
    device = torch.device("cpu") if arguments.interpret else meter.device
    rows = check(device)
    show("check", rows)
    wrong = [row for row in rows if max(row["y"], row["dx"], row["gradients"]) > row["tolerance"]]
    found: dict[str, float] = {}
    if not arguments.interpret and not wrong:
        rows += measure(QUICK if arguments.quick else FULL, meter)
        found = ratios(rows)
        print("\n".join(f"{name}: {ratio:.3f}" for name, ratio in found.items()))
    if arguments.json:
        _write(arguments.json, device, rows, found)
    if wrong:
        print(f"{len(wrong)} of {len(rows)} checks are beyond their tolerance", file=sys.stderr)
    return 1 if wrong else 0


def _missing(interpret: bool) -> str | None:
    if find_spec("triton") is None:
        return "Triton: pip install triton"
    if not interpret and not torch.cuda.is_available():
        return "a CUDA device, and torch sees none (--interpret checks the kernels on a CPU)"
    return None


def check(device: torch.device) -> Rows:
    """Every kernel against the reference in float64: mixed ranks, parts left out, tokens without adapter, odd sizes."""
    rows: Rows = []
    sites = [Site(24, (16, 9))] if device.type == "cpu" else [Site(2048, (2048, 512, 512)), Site(1001, (333, 77))]
    for site in sites:
        for shape in Shape:
            tiles = tiles_of(device.type, shape)
            adapters = [
                Adapter(tokens, rank, gap=rank % 3, scale=0.5, targets=targets[: len(site.sizes)])
                for tokens, rank, targets in (
                    (1, 8, (True, True, True)),
                    (tiles.tokens + 5, 128, (False, True, True)),
                    (0, 4, (True, True, True)),
                    (7, 24, (True, False, True)),
                    (2 * tiles.tokens, 1, (True, True, True)),
                )
            ]
            for dtype, tolerance in TOLERANCE.items():
                problem = Problem.random(adapters, site.inputs, site.sizes, dtype, tiles.tokens, device, tail=3)
                row: dict[str, Any] = {"what": "check", "shape": str(shape), "dtype": str(dtype).removeprefix("torch.")}
                row |= {"inputs": site.inputs, "parts": len(site.sizes), "tolerance": tolerance}
                rows.append(row | problem.errors(tiles))
    return rows


def measure(sweep: Sweep, meter: Meter) -> Rows:
    """All timings; each kind is printed when it is there. The last row says how many points were left out."""
    copy = _copy_bandwidth(meter, sweep.copy_bytes) / 1e9
    rows: Rows = [{"what": "copy", "gigabytes_per_second": copy}]
    print(f"copy: {copy:.0f} GB/s read and written")
    left_out = 0
    for what, measured, points in (
        ("step", step, step_points(sweep)),
        ("training", training, training_points(sweep)),
        ("decode", decode, decode_points(sweep)),
    ):
        found: Rows = []
        for point in points:
            if meter.over:
                left_out += 1
            else:
                found += [{"what": what, **row} for row in measured(sweep, meter, *point)]
        if what == "decode":
            found = [row | {"share_of_copy": row["gigabytes_per_second"] / copy} for row in found]
        show(what, found)
        rows += found
    if left_out:
        print(f"the time was over before {left_out} points were measured")
    return [*rows, {"what": "left_out", "points": left_out}]


def step_points(sweep: Sweep) -> Iterable[tuple[str, int]]:
    """Model and batch."""
    return product(sweep.models, sweep.batches)


def step(sweep: Sweep, meter: Meter, model: str, batch: int) -> Rows:
    """The linears of a layer in a decode step, mixed ranks at every site, over the same without adapters."""
    from marlaas_kernels.triton.op import segment_lora_

    sites = list(sweep.models[model].values()) * sweep.layers
    count = min(batch, max(sweep.adapters))
    ranks = [sweep.mixed_ranks[i % len(sweep.mixed_ranks)] for i in range(count)]
    weights = [torch.randn(sum(s.sizes), s.inputs, device=meter.device).bfloat16() for s in sites]
    problems = [_even(batch, ranks, site, meter.device) for site in sites]
    segments = [_in_torch(p)[0] for _, p in problems]

    def base() -> None:
        for weight, (_, p) in zip(weights, problems, strict=True):
            F.linear(p.x_TI, weight)

    def adapted() -> None:
        for weight, (tiles, p) in zip(weights, problems, strict=True):
            segment_lora_(F.linear(p.x_TI, weight), p.x_TI, p.bank, p.table, tiles)

    def in_torch() -> None:
        for weight, (_, p), of_site in zip(weights, problems, segments, strict=True):
            multi_lora_(F.linear(p.x_TI, weight), p.x_TI, of_site)

    alone, together, one_by_one = (meter.seconds([call]) / sweep.layers for call in (base, adapted, in_torch))
    row: dict[str, Any] = {"model": model, "batch": batch, "adapters": count}
    row |= {"base_microseconds": alone * 1e6, "microseconds": together * 1e6, "torch_microseconds": one_by_one * 1e6}
    return [row | {"over_base": together / alone, "over_torch": together / one_by_one}]


def training_points(sweep: Sweep) -> Iterable[tuple[str, str, int, int]]:
    """Model, fused linear, adapters and rank."""
    return product(sweep.kernel_models, sweep.sites, sweep.training_adapters, sweep.training_ranks)


def training(sweep: Sweep, meter: Meter, model: str, name: str, count: int, rank: int) -> Rows:
    """Forward and backward at one fused linear with thousands of tokens: TFLOPS, and time over the base's product."""
    from marlaas_kernels.triton.op import segment_lora_, segment_lora_backward

    site, tokens = sweep.models[model][name], sweep.training_tokens
    weight = torch.randn(sum(site.sizes), site.inputs, device=meter.device).bfloat16()
    tiles, p = _even(tokens, [rank] * count, site, meter.device)
    segments, buffers = _in_torch(p)
    h_STC = segment_lora_(p.y_TO.clone(), p.x_TI, p.bank, p.table, tiles)
    shrunk = multi_lora_(p.y_TO.clone(), p.x_TI, segments)
    gradients = (p.gradients, p.gradient_table)
    flops = 2 * tokens * rank * (len(site.sizes) * site.inputs + sum(site.sizes))
    base = meter.seconds([lambda: F.linear(p.x_TI, weight)])  # its backward is one product too: that of dx
    rows: Rows = []
    for kernel, work, ours, in_torch in (
        (
            "forward",
            flops,
            lambda: segment_lora_(p.y_TO, p.x_TI, p.bank, p.table, tiles),
            lambda: multi_lora_(p.y_TO, p.x_TI, segments),
        ),
        (
            "backward",
            2 * flops,
            lambda: segment_lora_backward(p.dy_TO, p.x_TI, h_STC, p.bank, p.table, *gradients, tiles),
            lambda: multi_lora_backward(p.dy_TO, p.x_TI, shrunk, segments, buffers),
        ),
    ):
        seconds, in_torch_seconds = meter.seconds([ours]), meter.seconds([in_torch])
        row: dict[str, Any] = {"model": model, "site": name, "adapters": count, "rank": rank, "kernel": kernel}
        row |= {"microseconds": seconds * 1e6, "teraflops": work / seconds / 1e12, "over_base": seconds / base}
        rows.append(row | {"over_torch": seconds / in_torch_seconds})
    return rows


def decode_points(sweep: Sweep) -> Iterable[tuple[str, str, int, int, int]]:
    """Model, fused linear, batch, adapters and rank."""
    points = product(sweep.kernel_models, sweep.sites, sweep.batches, sweep.adapters, sweep.ranks)
    return (point for point in points if point[3] <= point[2])


def decode(sweep: Sweep, meter: Meter, model: str, name: str, batch: int, count: int, rank: int) -> Rows:
    """Shrink and expand of a decode step at one fused linear: bytes a second."""
    from marlaas_kernels.triton.forward import expand_, shrink

    site = sweep.models[model][name]
    tiles, problem = _even(batch, [rank] * count, site, meter.device)
    x_bytes, y_bytes = problem.x_TI.nbytes, problem.y_TO.nbytes
    a_bytes = problem.bank.itemsize * count * rank * site.inputs * len(site.sizes)
    b_bytes = problem.bank.itemsize * count * rank * sum(site.sizes)
    copies = [
        replace(problem, bank=problem.bank.clone(), y_TO=problem.y_TO.clone())
        for _ in range(meter.copies(a_bytes + b_bytes + y_bytes))
    ]
    shrunk = [shrink(p.x_TI, p.bank, p.table, tiles) for p in copies]
    h_bytes = shrunk[0].nbytes
    shrinks = [lambda p=p: shrink(p.x_TI, p.bank, p.table, tiles) for p in copies]
    expands = [lambda p=p, h=h: expand_(p.y_TO, h, p.bank, p.table, tiles) for p, h in zip(copies, shrunk, strict=True)]
    rows: Rows = []
    for kernel, calls, moved in (
        ("shrink", shrinks, a_bytes + x_bytes + h_bytes),
        ("expand", expands, b_bytes + 2 * y_bytes + h_bytes),
    ):
        seconds = meter.seconds(calls)
        row: dict[str, Any] = {"model": model, "site": name, "batch": batch, "adapters": count, "rank": rank}
        row |= {"kernel": kernel, "microseconds": seconds * 1e6}
        rows.append(row | {"gigabytes_per_second": moved / seconds / 1e9})
    return rows


def _even(batch: int, ranks: Sequence[int], site: Site, device: torch.device) -> tuple[Tiles, Problem]:
    """A bf16 problem with the batch's tokens spread over adapters of these ranks."""
    count = len(ranks)
    tokens = [batch // count + (g < batch % count) for g in range(count)]
    tiles = tiles_of(device.type, Shape.of(max(tokens)))
    targets = (True,) * len(site.sizes)
    adapters = [Adapter(n, rank, targets=targets) for n, rank in zip(tokens, ranks, strict=True)]
    return tiles, Problem.random(adapters, site.inputs, site.sizes, torch.bfloat16, tiles.tokens, device)


def _in_torch(p: Problem) -> tuple[list[SegmentWeights], list[tuple[torch.Tensor, list[torch.Tensor]]]]:
    """The problem as `marlaas_kernels.segments` takes it: the adapters, and where their gradients go."""
    segments, buffers, t = [], [], p.table.segments
    for g, (start, end, rank) in enumerate(zip(t.start_G.tolist(), t.end_G.tolist(), t.rank_G.tolist(), strict=True)):
        matrices = []
        for bank, table in ((p.bank, p.table), (p.gradients, p.gradient_table)):
            rows, inputs = p.table.parts * rank, p.x_TI.shape[1]
            a = bank[int(table.a_offset_GP[g, 0]) :][: rows * inputs].view(rows, inputs)
            b = [
                bank[offset:][: rank * size].view(rank, size).T
                for offset, (_, size) in zip(table.b_offset_GP[g].tolist(), table.columns, strict=True)
            ]
            matrices.append((a, b))
        segments.append(SegmentWeights(start, end, float(t.scale_G[g]), *matrices[0], p.table.columns))
        buffers.append(matrices[1])
    return segments, buffers


def _copy_bandwidth(meter: Meter, size: int) -> float:
    """Bytes a second, read and written."""
    source = torch.empty(size, dtype=torch.uint8, device=meter.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / meter.seconds([lambda: target.copy_(source)])


def ratios(rows: Rows) -> dict[str, float]:
    """Medians over the rows that were measured."""
    values = {name: [row[key] for row in rows if row["what"] == what] for name, (what, key) in RATIOS.items()}
    return {name: median(of) for name, of in values.items() if of}


def show(what: str, rows: Rows) -> None:
    """Prints a kind's table."""
    columns = COLUMNS[what].split()
    lines = [columns, *([_text(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    print(f"\n{what}")
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _write(path: Path, device: torch.device, rows: Rows, ratios: dict[str, float]) -> None:
    versions = {}
    for package in ("torch", "triton"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    machine: dict[str, Any] = {"system": platform.platform(), "python": platform.python_version()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine |= {"gpu": properties.name, "capability": f"{properties.major}.{properties.minor}"}
        machine |= {"memory_gb": round(properties.total_memory / 2**30, 1), "cuda": torch.version.cuda}
    command = " ".join(["python", "-m", "bench.gpu", *sys.argv[1:]])
    document = {"bench": "gpu", "command": command, "machine": machine, "versions": versions}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document | {"rows": rows, "ratios": ratios}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
