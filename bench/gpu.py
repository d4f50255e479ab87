"""The Triton kernels on a CUDA device: right, and how fast against what the device can do. Needs torch and triton only.

PYTHONPATH=kernels python -m bench.gpu [--quick] [--json PATH]
PYTHONPATH=kernels python -m bench.gpu --interpret     (checks alone, on a CPU, in Triton's interpreter)

Exits 1 if a kernel is wrong and 2 without a CUDA device. Times are those of a CUDA graph that goes through copies of
the adapters until they no longer fit the device's cache, as the layers of a model do.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from bench.lora_problems import TOLERANCE, Adapter, Problem
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
BATCHES, ADAPTERS, RANKS = (1, 8, 32, 128, 256), (1, 8, 32), (8, 16, 64)
MIXED_RANKS = (8, 16, 32, 64)
TRAINING_TOKENS = 8192
COLUMNS = {
    "check": "shape dtype inputs parts y dx gradients tolerance",
    "decode": "model site batch adapters rank kernel microseconds gigabytes_per_second share_of_copy",
    "training": "model site adapters rank kernel microseconds teraflops over_base",
    "step": "model batch adapters base_microseconds microseconds over_base",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer points")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--interpret", action="store_true", help="check only, on a CPU, in Triton's interpreter")
    arguments = parser.parse_args()
    if arguments.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    elif not torch.cuda.is_available():
        print("bench.gpu needs a CUDA device (--interpret checks the kernels on a CPU)", file=sys.stderr)
        return 2
    device = torch.device("cpu" if arguments.interpret else "cuda")
    rows = check(device)
    _print("check", rows)
    wrong = [row for row in rows if max(row["y"], row["dx"], row["gradients"]) > row["tolerance"]]
    ratios: dict[str, float] = {}
    if not arguments.interpret and not wrong:
        rows += measure(arguments.quick)
        ratios = _ratios(rows)
        print("\n".join(f"{name}: {ratio:.3f}" for name, ratio in ratios.items()))
    if arguments.json:
        _write(arguments.json, device, rows, ratios)
    if wrong:
        print(f"{len(wrong)} of {len(rows)} checks are beyond their tolerance", file=sys.stderr)
    return 1 if wrong else 0


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


def measure(quick: bool) -> Rows:
    """All timings; each kind is printed when it is there."""
    rows: Rows = [{"what": "copy", "gigabytes_per_second": _copy_bandwidth() / 1e9}]
    print(f"copy: {rows[0]['gigabytes_per_second']:.0f} GB/s read and written")
    for what, kind in (("decode", decode), ("training", training), ("step", step)):
        found = kind(quick, rows[0]["gigabytes_per_second"])
        _print(what, found)
        rows += found
    return rows


def decode(quick: bool, copy: float) -> Rows:
    """Shrink and expand of a decode step at one fused linear: bytes a second against a copy on the same device."""
    from marlaas_kernels.triton.forward import expand_, shrink

    rows: Rows = []
    sites = [("1B", "qkv"), ("7B", "qkv")] if quick else [(m, s) for m in ("1B", "7B") for s in ("qkv", "down")]
    for model, name in sites:
        site = MODELS[model][name]
        for batch in BATCHES[::2] if quick else BATCHES:
            for count in [n for n in ADAPTERS if n <= batch]:
                for rank in RANKS:
                    tiles, problem = _even(batch, [rank] * count, site)
                    x_bytes, y_bytes = problem.x_TI.nbytes, problem.y_TO.nbytes
                    a_bytes = 2 * count * rank * site.inputs * len(site.sizes)
                    b_bytes = 2 * count * rank * sum(site.sizes)
                    copies = _copies(problem, a_bytes + b_bytes + y_bytes)
                    shrunk = [shrink(p.x_TI, p.bank, p.table, tiles) for p in copies]
                    calls = {
                        "shrink": (
                            [lambda p=p: shrink(p.x_TI, p.bank, p.table, tiles) for p in copies],
                            a_bytes + x_bytes + shrunk[0].nbytes,
                        ),
                        "expand": (
                            [
                                lambda p=p, h=h: expand_(p.y_TO, h, p.bank, p.table, tiles)
                                for p, h in zip(copies, shrunk, strict=True)
                            ],
                            b_bytes + 2 * y_bytes + shrunk[0].nbytes,
                        ),
                    }
                    for kernel, (todo, moved) in calls.items():
                        seconds = _seconds(todo)
                        row: dict[str, Any] = {"what": "decode", "model": model, "site": name, "batch": batch}
                        row |= {"adapters": count, "rank": rank, "kernel": kernel, "microseconds": seconds * 1e6}
                        speed = moved / seconds / 1e9
                        rows.append(row | {"gigabytes_per_second": speed, "share_of_copy": speed / copy})
    return rows


def training(quick: bool, copy: float) -> Rows:
    """Forward and backward at one fused linear with thousands of tokens: TFLOPS, and time over the base's product."""
    from marlaas_kernels.triton.op import segment_lora_, segment_lora_backward

    rows: Rows = []
    for model, name in [("7B", "qkv")] if quick else [(m, s) for m in ("1B", "7B") for s in ("qkv", "down")]:
        site = MODELS[model][name]
        weight = torch.randn(sum(site.sizes), site.inputs, device="cuda").bfloat16()
        for count in (1, 4, 16):
            for rank in (16, 64):
                tiles, p = _even(TRAINING_TOKENS, [rank] * count, site)
                h_STC = segment_lora_(p.y_TO.clone(), p.x_TI, p.bank, p.table, tiles)
                base = _seconds([lambda p=p: F.linear(p.x_TI, weight)])
                flops = 2 * TRAINING_TOKENS * rank * (len(site.sizes) * site.inputs + sum(site.sizes))

                def forward(p: Problem = p, tiles: Tiles = tiles) -> None:
                    segment_lora_(p.y_TO, p.x_TI, p.bank, p.table, tiles)

                def backward(p: Problem = p, tiles: Tiles = tiles, h_STC: torch.Tensor = h_STC) -> None:
                    segment_lora_backward(
                        p.dy_TO, p.x_TI, h_STC, p.bank, p.table, p.gradients, p.gradient_table, tiles
                    )

                # the base's backward is one product too, that of dx: its weights are frozen
                for kernel, call, work in (("forward", forward, flops), ("backward", backward, 2 * flops)):
                    seconds = _seconds([call])
                    row: dict[str, Any] = {"what": "training", "model": model, "site": name, "adapters": count}
                    row |= {"rank": rank, "kernel": kernel, "microseconds": seconds * 1e6}
                    rows.append(row | {"teraflops": work / seconds / 1e12, "over_base": seconds / base})
    return rows


def step(quick: bool, copy: float) -> Rows:
    """The linears of a layer in a decode step, mixed ranks at every site, over the same without adapters."""
    from marlaas_kernels.triton.op import segment_lora_

    rows: Rows = []
    layers = 4  # so that the weights are not in the cache when their turn comes again
    for model in ("7B",) if quick else MODELS:
        sites = list(MODELS[model].values()) * layers
        weights = [torch.randn(sum(s.sizes), s.inputs, device="cuda").bfloat16() for s in sites]
        for batch in (32, 256) if quick else BATCHES:
            count = min(batch, 32)
            ranks = [MIXED_RANKS[i % len(MIXED_RANKS)] for i in range(count)]
            problems = [_even(batch, ranks, site) for site in sites]

            def base(weights: list[torch.Tensor] = weights, problems: list[tuple[Tiles, Problem]] = problems) -> None:
                for weight, (_, p) in zip(weights, problems, strict=True):
                    F.linear(p.x_TI, weight)

            def adapted(weights: list[torch.Tensor] = weights, problems: list[tuple[Tiles, Problem]] = problems) -> None:
                for weight, (tiles, p) in zip(weights, problems, strict=True):
                    segment_lora_(F.linear(p.x_TI, weight), p.x_TI, p.bank, p.table, tiles)

            alone, together = _seconds([base]) / layers, _seconds([adapted]) / layers
            row: dict[str, Any] = {"what": "step", "model": model, "batch": batch, "adapters": count}
            row |= {"base_microseconds": alone * 1e6, "microseconds": together * 1e6}
            rows.append(row | {"over_base": together / alone})
    return rows


def _even(batch: int, ranks: Sequence[int], site: Site) -> tuple[Tiles, Problem]:
    """A bf16 problem with the batch's tokens spread over adapters of these ranks."""
    count = len(ranks)
    tokens = [batch // count + (g < batch % count) for g in range(count)]
    tiles = tiles_of("cuda", Shape.of(max(tokens)))
    targets = (True,) * len(site.sizes)
    adapters = [Adapter(n, rank, targets=targets) for n, rank in zip(tokens, ranks, strict=True)]
    return tiles, Problem.random(adapters, site.inputs, site.sizes, torch.bfloat16, tiles.tokens, "cuda")


def _copies(problem: Problem, moved: int) -> list[Problem]:
    """As many copies as do not fit the device's cache together."""
    cache = torch.cuda.get_device_properties().L2_cache_size
    count = min(64, 4 * cache // moved + 2)
    return [replace(problem, bank=problem.bank.clone(), y_TO=problem.y_TO.clone()) for _ in range(count)]


def _seconds(calls: Sequence[Callable[[], object]], repeats: int = 15) -> float:
    """Median seconds of a call, of all of them in one CUDA graph; a single one is captured ten times."""
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


def _copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy of 1 GiB."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds([lambda: target.copy_(source)])


def _ratios(rows: Rows) -> dict[str, float]:
    def of(what: str, key: str) -> float:
        return median(row[key] for row in rows if row["what"] == what)

    return {
        "decode_share_of_copy": of("decode", "share_of_copy"),
        "training_over_base": of("training", "over_base"),
        "step_over_base": of("step", "over_base"),
    }


def _print(what: str, rows: Rows) -> None:
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
