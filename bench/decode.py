"""Decoding with many adapters in one batch, against PEFT's `generate`, vLLM's CPU build, and the base model alone.

python -m bench.decode [--quick] [--threads N] [--cells 1x1 128x32] [--json PATH]

A cell is so many rows under so many adapters of rank 16 on all linears, dealt in turn. Each row has a prompt of 32
random tokens of its own and samples 32 more at temperature 1, whatever they are. Seconds are from the first submission
to the last token, prompts included; in each of a cell's runs all sides take the same prompts, one side after another.

Ratios are medians over the runs, of tokens a second at 128 rows under 32 adapters, so more is better for us:
ours_over_peft (against the fastest of what PEFT offers, see peers/peft_decode.py), ours_over_vllm_cpu (see
peers/vllm_decode.py), adapters_over_base (against the same rows without adapters), and batch1_over_peft for a single
row. batch1_over_bandwidth is one decoding step of a single row over the time that reading the base's and the adapter's
weights takes at the bandwidth measured in the same run: 1 is the least there can be, if no cache helps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.adapters import RANK, random_adapters, write_adapters
from bench.ceilings import read_bandwidth
from bench.common import median, table, write_json
from bench.peers.environment import peer_python, read_requirements
from bench.workers import Worker, WorkerFailed
from marlaas.devices import reuse_freed_memory
from marlaas.lora import AdapterBank, AdapterLayout, PagedAdapters
from marlaas.models import BaseModel, load_base_model
from marlaas.sampling.native import NativeSampler
from marlaas.sampling.protocol import Decoding, Sample, SamplingRequest
from marlaas.specs import ModelSpec

PROMPT = NEW = 32  # tokens
RUNS = 3
PEERS = ("peft", "vllm_cpu")
# PEFT's ways of serving several adapters, and the types that its adapters may have.
PEFT_WAYS = [{"mode": m, "dtype": d} for m in ("mixed", "swapped") for d in ("float32", "bfloat16")]
COLUMNS = ["rows", "adapters", "side", "seconds", "tokens_per_second", "way"]
_PROBE_SEED, _WARM_SEED = 1_000_000, 1_000_001
_SPECIAL = 64  # the first token ids, of which some have a meaning
_VLLM_WITHOUT = ("torchvision", "torchaudio", "torchcodec")  # not needed, and torchvision's breaks the import


@dataclass(frozen=True)
class Cell:
    """So many rows, dealt in turn to so many adapters."""

    rows: int
    adapters: int

    @staticmethod
    def of(text: str) -> Cell:
        """ROWSxADAPTERS. Raises ValueError."""
        rows, adapters = map(int, text.split("x"))
        if not 1 <= adapters <= rows:
            raise ValueError(f"{text}: adapters must be from 1 to the number of rows")
        return Cell(rows, adapters)


HEADLINE, ALONE = Cell(128, 32), Cell(1, 1)
QUICK = [ALONE, Cell(32, 8), HEADLINE]
FULL = [Cell(rows, adapters) for rows in (1, 8, 32, 128, 256) for adapters in (1, 8, 32) if adapters <= rows]


@dataclass(frozen=True)
class Work:
    """Prompts `[rows][PROMPT]` of token ids, and the adapter that each row has."""

    prompts: list[list[int]]
    adapters: list[int]


def make_work(cell: Cell, vocabulary: int, seed: int) -> Work:
    """Random prompts; no two seeds share any."""
    rng = np.random.default_rng([seed, cell.rows, cell.adapters])
    prompts = rng.integers(min(_SPECIAL, vocabulary // 2), vocabulary, (cell.rows, PROMPT)).tolist()
    return Work(prompts, [row % cell.adapters for row in range(cell.rows)])


@dataclass
class Measured:
    """A side's runs of a cell, in seconds. way: which of a peer's, if it has several; extra: more of each run."""

    cell: Cell
    side: str
    runs: list[float] = field(default_factory=list)
    way: str | None = None
    extra: dict[str, list[float]] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        seconds = median(self.runs)
        return {
            "rows": self.cell.rows,
            "adapters": self.cell.adapters,
            "side": self.side,
            "seconds": seconds,
            "tokens_per_second": self.cell.rows * NEW / seconds,
            "way": self.way,
            "runs": self.runs,
            **self.extra,
        }


class Ours:
    """A native sampler with all adapters and the batch's places for the largest cell. One tenant an adapter."""

    def __init__(self, base: BaseModel, layout: AdapterLayout, vectors: Sequence[torch.Tensor], rows: int) -> None:
        t = base.transformer
        adapters = PagedAdapters(AdapterBank(len(vectors), layout.size, t.dtype, t.device))
        for i, vector in enumerate(vectors):
            adapters.add(_name(i), layout, vector)
        self.sampler = NativeSampler(base, adapters, rows, PROMPT + NEW)
        self.sampler.calibrate()
        self.bytes_read = sum(s.weight.nbytes for s in t.sites) + t.head.nbytes + vectors[0].nbytes

    def run(
        self, work: Work, tokens: int = NEW, decoding: Decoding = Decoding.SAMPLE, base_only: bool = False
    ) -> tuple[float, list[float], list[list[int]]]:
        """Seconds of all, seconds of each step, and the rows' tokens."""
        replies: dict[int, list[int]] = {}
        steps: list[float] = []
        started = time.perf_counter()
        for row, (prompt, adapter) in enumerate(zip(work.prompts, work.adapters, strict=True)):
            name = None if base_only else _name(adapter)
            request = SamplingRequest(f"t{adapter}", tuple(prompt), name, decoding, tokens, frozenset(), seed=row)
            self.sampler.submit(request, lambda outcome, row=row: replies.update({row: _tokens(outcome)}))  # type: ignore[misc]
        while self.sampler.busy:
            stepped = time.perf_counter()
            self.sampler.step()
            steps.append(time.perf_counter() - stepped)
        return time.perf_counter() - started, steps, [replies[row] for row in range(len(replies))]


def _name(adapter: int) -> str:
    return f"t{adapter}/bench/v0"


def _tokens(outcome: Sample | Exception) -> list[int]:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome.tokens


class Bench:
    """All sides, and what is measured so far."""

    def __init__(self, ours: Ours, peers: Mapping[str, Worker], vocabulary: int) -> None:
        self.ours, self.peers, self.vocabulary = ours, peers, vocabulary
        self.measured: list[Measured] = []

    def check_sides(self) -> dict[str, float]:
        """The share of greedy tokens that a peer has in common with us; rounding in bf16 makes some differ.

        Raises RuntimeError when a side's adapters make no difference: then they were not loaded.
        """
        probe = Work(make_work(ALONE, self.vocabulary, _PROBE_SEED).prompts * 2, [0, 1])
        replies = {"ours": self.ours.run(probe, decoding=Decoding.GREEDY)[2]}
        for name, peer in self.peers.items():
            replies[name] = self._ask(peer, probe, greedy=True, **PEFT_WAYS[0])["tokens"]
        for name, (one, other) in replies.items():
            if one == other:
                raise RuntimeError(f"{name}: two adapters give the same reply")
        return {name: agreement(replies["ours"], replies[name]) for name in self.peers}

    def warm_up(self) -> None:
        """A few tokens of every kind on every side: what is prepared or compiled at first use is not timed."""
        for cell in (ALONE, Cell(4, 2)):
            work = make_work(cell, self.vocabulary, _WARM_SEED)
            self.ours.run(work, tokens=4)
            self.ours.run(work, tokens=4, base_only=True)
            for peer in self.peers.values():
                for way in PEFT_WAYS:
                    self._ask(peer, work, tokens=2, **way)

    def measure(self, cell: Cell, runs: int) -> None:
        """So many runs of a cell on every side."""
        sides = {name: Measured(cell, name) for name in ("ours", "base", *self.peers)}
        for run in range(runs):
            work = make_work(cell, self.vocabulary, run)
            self._measure_ours(sides, work, alone=cell == ALONE)
            for name, peer in self.peers.items():
                self._measure_peer(sides[name], peer, work)
        self.measured += sides.values()
        for side in sides.values():
            print(json.dumps(side.row()), flush=True)

    def _measure_ours(self, sides: Mapping[str, Measured], work: Work, alone: bool) -> None:
        seconds, steps, replies = self.ours.run(work)
        _check_lengths("ours", replies)
        sides["ours"].runs.append(seconds)
        if alone:
            extra = {"step_seconds": median(steps[1:]), "read_seconds": self.ours.bytes_read / read_bandwidth()}
            for name, value in extra.items():
                sides["ours"].extra.setdefault(name, []).append(value)
        sides["base"].runs.append(self.ours.run(work, base_only=True)[0])

    def _measure_peer(self, side: Measured, peer: Worker, work: Work) -> None:
        """The first run takes every way there is; the fastest is the side's from then on."""
        if side.side != "peft":
            answers = {"": self._ask(peer, work)}
        elif side.way is None:
            ways = [way for way in PEFT_WAYS if len(set(work.adapters)) > 1 or way["mode"] == "swapped"]
            answers = {json.dumps(way): self._ask(peer, work, **way) for way in ways}
        else:
            answers = {side.way: self._ask(peer, work, **json.loads(side.way))}
        for answer in answers.values():
            _check_lengths(side.side, answer["tokens"])
        way, fastest = min(answers.items(), key=lambda item: item[1]["seconds"])
        if side.way is None and way:
            side.way = way
            side.extra["first_run"] = [answer["seconds"] for answer in answers.values()]
        side.runs.append(fastest["seconds"])

    def _ask(self, peer: Worker, work: Work, tokens: int = NEW, greedy: bool = False, **way: str) -> dict[str, Any]:
        request = {"prompts": work.prompts, "adapters": work.adapters, "tokens": tokens, "greedy": greedy, **way}
        return peer.ask(request)


def _check_lengths(side: str, replies: Iterable[Sequence[int]]) -> None:
    assert all(len(reply) == NEW for reply in replies), f"{side}: a reply is not of {NEW} tokens"


def agreement(replies: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """The share of tokens before the first that differs."""
    equal = 0
    for reply, other in zip(replies, others, strict=True):
        differs = [i for i, (a, b) in enumerate(zip(reply, other, strict=True)) if a != b]
        equal += differs[0] if differs else len(reply)
    return equal / sum(map(len, replies))


def summary(measured: Sequence[Measured]) -> dict[str, float]:
    """The ratios of what was measured; those whose sides or cells are missing are left out."""
    by_place = {(m.cell, m.side): m for m in measured}
    ratios = {}
    for name, cell, other in (
        ("ours_over_peft", HEADLINE, "peft"),
        ("ours_over_vllm_cpu", HEADLINE, "vllm_cpu"),
        ("adapters_over_base", HEADLINE, "base"),
        ("batch1_over_peft", ALONE, "peft"),
        ("batch1_over_vllm_cpu", ALONE, "vllm_cpu"),
    ):
        if (cell, "ours") in by_place and (cell, other) in by_place:
            pairs = zip(by_place[cell, "ours"].runs, by_place[cell, other].runs, strict=True)
            ratios[name] = median(others / ours for ours, others in pairs)
    if (ALONE, "ours") in by_place:
        extra = by_place[ALONE, "ours"].extra
        steps = zip(extra["step_seconds"], extra["read_seconds"], strict=True)
        ratios["batch1_over_bandwidth"] = median(step / read for step, read in steps)
    return ratios


def open_peers(
    names: Sequence[str], job: Mapping[str, Any], stack: contextlib.ExitStack
) -> tuple[dict[str, Worker], dict[str, str]]:
    """The peers' workers, until the stack closes; and for each that does not run, why."""
    here = Path(__file__).parent / "peers"
    opened: dict[str, Worker] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            if name == "peft":
                worker = Worker("bench.peers.peft_decode", job, job["threads"])
            else:
                python = peer_python("vllm", read_requirements(here / "vllm-requirements.txt"), _VLLM_WITHOUT)
                worker = Worker("bench.peers.vllm_decode", job, job["threads"], python)
            opened[name] = stack.enter_context(worker)
        except (subprocess.CalledProcessError, WorkerFailed) as error:
            missing[name] = str(error)
            print(f"{name} is not measured: {error}", flush=True)
    return opened, missing


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer cells")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there")
    parser.add_argument("--threads", type=int, default=2, help="of every side")
    parser.add_argument("--cells", type=Cell.of, nargs="+", metavar="ROWSxADAPTERS", help="instead of the usual ones")
    parser.add_argument("--runs", type=int, default=RUNS, help="of each cell and side")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what a fleet's model.source may be")
    options = parser.parse_args(arguments)
    cells: list[Cell] = options.cells or (QUICK if options.quick else FULL)
    torch.set_num_threads(options.threads)
    reuse_freed_memory()
    base = load_base_model(ModelSpec(source=options.model, device="cpu"))
    rows, adapters = max(c.rows for c in cells), max(c.adapters for c in cells)
    layout, vectors = random_adapters(base, max(2, adapters))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        job = {
            "model": str(base.folder.absolute()),
            "adapters": write_adapters(base, layout, vectors, folder),
            "threads": options.threads,
            "rows": rows,
            "tokens": PROMPT + NEW,
            "rank": RANK,
        }
        peers, missing = open_peers(options.peers, job, stack)
        bench = Bench(Ours(base, layout, vectors, rows), peers, base.transformer.geometry.vocabulary)
        bench.warm_up()
        agreed = bench.check_sides()
        for cell in cells:
            bench.measure(cell, options.runs)
        versions = {name: peer.ready["versions"] for name, peer in peers.items()}
    found = [measured.row() for measured in bench.measured]
    ratios = summary(bench.measured)
    table(found, COLUMNS, "decoding")
    table([{"ratio": name, "median": value} for name, value in ratios.items()], ["ratio", "median"], "ratios")
    write_json(
        options.json,
        "decode",
        found,
        ratios,
        greedy_tokens_in_common=agreed,
        shared_places=bench.ours.sampler.shared_places,
        peers=versions,
        not_run=missing,
    )


if __name__ == "__main__":
    main()
