"""The kernels by themselves: time, bytes and operations, and their share of what the machine can do at most.

python -m bench.kernels [--quick] [--threads N] [--json PATH]

lora: the adapters' deltas of a whole pass, at every linear of every layer of the model, of so many tokens dealt to so
many adapters; by the processor's kernel and by torch (`marlaas_kernels.segments`). The vocabulary's kernels: draw,
logprobs and gradient of so many rows of bf16 logits, against their torch definitions in `marlaas.sampling.choice` and
`marlaas.training.logprobs`. Where Numba is not installed, only torch's side runs.

Bytes are those that have to be moved once: weights and logits are read, sums are read and written. Operations are
multiplications and additions. of_bandwidth and of_arithmetic are the shares of a large read and of a large matrix
product in the side's type, measured in the same run with as many threads. A share of the bandwidth above 1 means that
caches helped. As in the sampler, each of torch's threads takes its own tokens through the LoRA kernel; those of the
vocabulary run on one.

Ratios are medians over the runs of speeds, the kernel's over torch's, so more is better: lora_over_torch at 128 tokens
of 32 adapters of rank 16; draw_over_torch, logprobs_over_torch and gradient_over_torch at 128 rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from bench.adapters import RANK, random_adapters
from bench.ceilings import matmul_rate, read_bandwidth
from bench.common import median, table, write_json
from marlaas.cpu_kernels import as_array, runs_here
from marlaas.devices import reuse_freed_memory
from marlaas.lora import LoraBatch, Segment
from marlaas.models import BaseModel, load_base_model
from marlaas.sampling import choice
from marlaas.specs import ModelSpec
from marlaas.training import logprobs
from marlaas.training.logprobs import Targets

RUNS = 3
ENOUGH_SECONDS = 0.05  # of a run; shorter passes are repeated
HEADLINE = {"lora": (128, RANK, 32)} | dict.fromkeys(("draw", "logprobs", "gradient"), (128, 0, 0))
TOKENS = {True: (1, 32, 128), False: (1, 4, 16, 64, 128, 256)}  # by whether it is quick
RANKS = {True: (8, 16, 64), False: (8, 16, 32, 64)}
ADAPTERS = {True: (1, 8, 32), False: (1, 4, 8, 32)}
ROWS = {True: (1, 128), False: (1, 32, 128, 256, 512)}
_LEAST_OF_A_THREAD = 8  # tokens, as in the sampler
COLUMNS = {
    "lora": "what side tokens rank adapters seconds megabytes gigaops of_bandwidth of_arithmetic",
    "vocabulary": "what side tokens seconds megabytes of_bandwidth",
}


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second, and operations a second in fp32 and bf16."""

    bandwidth: float
    arithmetic: dict[torch.dtype, float]

    @staticmethod
    def measure() -> Ceilings:
        """Of this machine, with torch's threads."""
        return Ceilings(read_bandwidth(), {dtype: matmul_rate(dtype) for dtype in (torch.float32, torch.bfloat16)})


@dataclass
class Measured:
    """One way of computing one thing. bytes, operations: of a pass; runs: seconds of a pass."""

    what: str
    side: str
    tokens: int
    dtype: torch.dtype
    bytes: int
    operations: int | None = None
    rank: int = 0
    adapters: int = 0
    runs: list[float] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int, int]:
        return self.tokens, self.rank, self.adapters

    def row(self, ceilings: Ceilings) -> dict[str, Any]:
        seconds = median(self.runs)
        of_lora = {"rank": self.rank, "adapters": self.adapters} if self.rank else {}
        row = {"what": self.what, "side": self.side, "tokens": self.tokens, **of_lora, "seconds": seconds}
        row |= {"megabytes": self.bytes / 1e6, "of_bandwidth": self.bytes / seconds / ceilings.bandwidth}
        if self.operations is not None:
            of_arithmetic = self.operations / seconds / ceilings.arithmetic[self.dtype]
            row |= {"gigaops": self.operations / 1e9, "of_arithmetic": of_arithmetic}
        return row | {"runs": self.runs}


Work = Callable[[], object]
Inputs = dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]
"""By the numbers of inputs and outputs of a linear: x, and the y that the deltas are added to."""


def measure(ways: Sequence[tuple[Measured, Callable[[], Work]]], runs: int) -> Iterator[Measured]:
    """Runs the ways in turns. Each is given by what prepares a pass and returns it; preparing is not timed."""
    for _, prepare in ways:
        prepare()()
    for _ in range(runs):
        for measured, prepare in ways:
            measured.runs.append(seconds_of_a_pass(prepare))
    yield from (measured for measured, _ in ways)


def seconds_of_a_pass(prepare: Callable[[], Work]) -> float:
    """The mean over as many passes as ENOUGH_SECONDS takes."""
    spent, passes = 0.0, 0
    while spent < ENOUGH_SECONDS:
        work = prepare()
        started = time.perf_counter()
        work()
        spent += time.perf_counter() - started
        passes += 1
    return spent / passes


def segments_of(tokens: int, adapters: int) -> list[tuple[int, int]]:
    """[start, end) of each adapter's tokens, as equal as they can be."""
    ends = [tokens * (i + 1) // adapters for i in range(adapters)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


class Lora:
    """The deltas of a pass through the model."""

    def __init__(self, base: BaseModel, rank: int, adapters: int) -> None:
        self._sites = base.transformer.sites
        self._layout, vectors = random_adapters(base, adapters, rank)
        self._bank_SP = torch.stack(vectors)
        self._threads = ThreadPoolExecutor(torch.get_num_threads())

    def ways(self, tokens: int, adapters: int) -> list[tuple[Measured, Callable[[], Work]]]:
        """Ours and torch's, for so many tokens of the first adapters."""
        sizes = {(site.inputs, site.weight.shape[0]) for site in self._sites}
        features = sum(site.inputs + 2 * site.weight.shape[0] for site in self._sites)
        dtype, found = self._bank_SP.dtype, []
        weights, operations = adapters * self._layout.size * dtype.itemsize, 2 * tokens * self._layout.size

        def measured(side: str, of: torch.dtype) -> Measured:
            moved = weights + tokens * features * of.itemsize
            return Measured("lora", side, tokens, of, moved, operations, self._layout.shape.rank, adapters)

        def data(of: torch.dtype) -> Inputs:
            return {(i, o): (torch.randn(tokens, i).to(of), torch.zeros(tokens, o, dtype=of)) for i, o in sizes}

        if runs_here(torch.device("cpu"), dtype):
            of_kernel = self.kernel(tokens, adapters, data(torch.float32))
            found.append((measured("kernel", torch.float32), lambda: of_kernel))
        of_torch = self.torch(tokens, adapters, data(dtype))
        found.append((measured("torch", dtype), lambda: of_torch))
        return found

    def kernel(self, tokens: int, adapters: int, data: Inputs) -> Work:
        """The processor's, of fp32 inputs and outputs."""
        parts = max(1, min(torch.get_num_threads(), tokens // _LEAST_OF_A_THREAD))
        runs = [self._part(window, segments_of(tokens, adapters), data) for window in segments_of(tokens, parts)]
        if len(runs) == 1:
            return runs[0]
        return lambda: list(self._threads.map(lambda run: run(), runs))

    def _part(self, window: tuple[int, int], spans: Sequence[tuple[int, int]], data: Inputs) -> Work:
        """The tokens of a window."""
        from marlaas_kernels.cpu.lora import PARTS, add_lora

        layout, (first, last), rank = self._layout, window, self._layout.shape.rank
        numbers = [
            (max(start, first) - first, min(end, last) - first, self._bank_SP[i].data_ptr(), rank, 0)
            for i, (start, end) in enumerate(spans)
            if start < last and end > first
        ]
        segments_GK, like = np.array(numbers, dtype=np.int64), as_array(self._bank_SP[0, :0])
        scale_G = np.full(len(numbers), layout.scale, dtype=np.float32)
        h_TR = np.empty((last - first, PARTS * rank), dtype=np.float32)
        calls = []
        for site in self._sites:
            x, y = (tensor[first:last].numpy() for tensor in data[site.inputs, site.weight.shape[0]])
            calls.append((x, y, layout.table[None, site.layer, layout.site(site).index]))

        def run() -> None:
            for x, y, site_AS in calls:
                add_lora(x, y, h_TR, segments_GK, scale_G, site_AS, like)

        return run

    def torch(self, tokens: int, adapters: int, data: Inputs) -> Work:
        """torch's, of inputs and outputs in the model's dtype."""
        spans = segments_of(tokens, adapters)
        segments = [Segment(s, e, self._layout, self._bank_SP[i], slot=i) for i, (s, e) in enumerate(spans)]

        @torch.inference_mode()
        def run() -> None:
            batch = LoraBatch(segments, self._bank_SP)
            for site in self._sites:
                batch.add(site, *data[site.inputs, site.weight.shape[0]])

        return run


def vocabulary_ways(what: str, rows: int, vocabulary: int) -> list[tuple[Measured, Callable[[], Work]]]:
    """Ours and the torch definition of `draw`, `logprobs` or `gradient`."""
    generator = torch.Generator().manual_seed(rows)
    logits_NV = (torch.randn(rows, vocabulary, generator=generator) * 3).to(torch.bfloat16)
    tokens_N = torch.randint(0, vocabulary, (rows,), generator=generator)
    one_N = torch.ones(rows)
    uniform_N = torch.rand(rows, generator=generator, dtype=torch.float64)
    targets = Targets(tokens_N, one_N, torch.zeros(rows, dtype=torch.int64), one_N)

    def work() -> Work:
        if what == "draw":
            return lambda: choice.draw_at(logits_NV, one_N, uniform_N)
        if what == "logprobs":
            return lambda: logprobs.logprobs_and_entropy(logits_NV, targets)
        own = logits_NV.clone()  # the gradient takes their memory
        return lambda: logprobs.logits_gradient(own, targets, one_N)

    def in_torch() -> Work:
        ours = work()

        def run() -> object:
            with mock.patch.object(choice, "runs_here", _never), mock.patch.object(logprobs, "runs_here", _never):
                return ours()

        return run

    moved = logits_NV.nbytes * (2 if what == "gradient" else 1)
    found = [(Measured(what, "torch", rows, torch.bfloat16, moved), in_torch)]
    if runs_here(torch.device("cpu"), torch.bfloat16):
        found.insert(0, (Measured(what, "kernel", rows, torch.bfloat16, moved), work))
    return found


def _never(device: torch.device, dtype: torch.dtype) -> bool:
    return False


def summary(measured: Sequence[Measured]) -> dict[str, float]:
    """The kernels' speeds over torch's, of what was measured on both sides."""
    ratios = {}
    for what, key in HEADLINE.items():
        sides = {m.side: m for m in measured if m.what == what and m.key == key}
        if len(sides) == 2:
            pairs = zip(sides["kernel"].runs, sides["torch"].runs, strict=True)
            ratios[f"{what}_over_torch"] = median(by_torch / ours for ours, by_torch in pairs)
    return ratios


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer points")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--runs", type=int, default=RUNS, help="of each point")
    parser.add_argument("--tokens", type=int, nargs="+", help="instead of the usual ones; of the vocabulary: rows")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what a fleet's model.source may be")
    options = parser.parse_args(arguments)
    quick = options.quick
    torch.set_num_threads(options.threads)
    reuse_freed_memory()
    base = load_base_model(ModelSpec(source=options.model, device="cpu"))
    ceilings = Ceilings.measure()
    measured: list[Measured] = []
    for rank in RANKS[quick]:
        lora = Lora(base, rank, max(ADAPTERS[quick]))
        for tokens in options.tokens or TOKENS[quick]:
            for adapters in (n for n in ADAPTERS[quick] if n <= tokens):
                measured += measure(lora.ways(tokens, adapters), options.runs)
    for what in ("draw", "logprobs", "gradient"):
        for rows in options.tokens or ROWS[quick]:
            measured += measure(vocabulary_ways(what, rows, base.transformer.geometry.vocabulary), options.runs)
    found, ratios = [m.row(ceilings) for m in measured], summary(measured)
    table([row for row in found if row["what"] == "lora"], COLUMNS["lora"].split(), "multi-LoRA")
    table([row for row in found if row["what"] != "lora"], COLUMNS["vocabulary"].split(), "vocabulary")
    table([{"ratio": name, "median": value} for name, value in ratios.items()], ["ratio", "median"], "ratios")
    arithmetic = {str(dtype).removeprefix("torch."): rate / 1e9 for dtype, rate in ceilings.arithmetic.items()}
    print(f"a read reaches {ceilings.bandwidth / 1e9:.1f} GB/s, matrix products {arithmetic} Gop/s")
    write_json(
        options.json,
        "kernels",
        found,
        ratios,
        ceilings={"gigabytes_per_second": ceilings.bandwidth / 1e9, "gigaops_per_second": arithmetic},
    )


if __name__ == "__main__":
    main()
