"""A training step with many adapters against one with a single adapter, and against TRL's GRPOTrainer with PEFT.

python -m bench.train_step [--quick] [--threads N] [--json PATH]

A step is so many samples in groups of 8: prompts of 64 random tokens, completions of 32, half of a group rewarded. Both
sides go from the samples to the stepped weights of adapters of rank 16 on all linears of SmolLM2-135M in bf16, in
processes of their own; in each run they take the same samples, one side after another. TRL's side is
`peers/trl_step.py`; it runs the step in one pass and, as is its default, in passes of 8 samples.

Ratios are medians over the runs. mixed_over_single: seconds of 256 samples of 32 adapters over those of one adapter.
ours_over_peft: tokens a second at 64 samples over those of the faster of TRL's ways, so more is better for us.
peak_memory_over_peft: what the first step of 64 samples in one pass needs beyond the loaded model, the adapter and its
optimizer included, over the same of TRL; peak_memory_over_peft_in_passes: over TRL in passes of 8.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.adapters import RANK
from bench.common import median, table, write_json
from bench.peers.environment import peer_python, read_requirements
from bench.workers import Worker, WorkerFailed
from marlaas.models import resolve_model
from marlaas.specs import TARGETS, ModelSpec, PoolSpec

GROUP, PROMPT, NEW = 8, 64, 32
MIXED = 32  # adapters
PASS = 8  # samples of a pass of TRL, unless it takes all at once
AGAINST_TRL = 64  # samples, of the headline
RUNS = 3
COLUMNS = ["samples", "adapters", "side", "seconds", "tokens_per_second", "peak_mb"]
_SPECIAL = 64  # the first token ids, of which some have a meaning


@dataclass
class Measured:
    """A side's runs of a step, in seconds. peak_bytes: of its process's first step, beyond the loaded model."""

    side: str
    samples: int
    adapters: int = 1
    runs: list[float] = field(default_factory=list)
    peak_bytes: int | None = None

    def row(self) -> dict[str, Any]:
        seconds = median(self.runs)
        return {
            "samples": self.samples,
            "adapters": self.adapters,
            "side": self.side,
            "seconds": seconds,
            "tokens_per_second": self.samples * (PROMPT + NEW) / seconds,
            "peak_mb": None if self.peak_bytes is None else self.peak_bytes / 2**20,
            "runs": self.runs,
        }


def make_step(samples: int, vocabulary: int, seed: int) -> dict[str, Any]:
    """Prompts, one a group, completions and rewards, one a sample: random tokens, every other sample rewarded."""
    rng = np.random.default_rng([seed, samples])
    low = min(_SPECIAL, vocabulary // 2)
    return {
        "prompts": rng.integers(low, vocabulary, (samples // GROUP, PROMPT)).tolist(),
        "completions": rng.integers(low, vocabulary, (samples, NEW)).tolist(),
        "rewards": [float(i % 2) for i in range(samples)],
    }


class Bench:
    """Our worker, and what is measured so far."""

    def __init__(self, ours: Worker, runs: int) -> None:
        self.ours, self.runs = ours, runs
        self.measured: list[Measured] = []
        self._vocabulary: int = ours.ready["vocabulary"]

    def one_adapter_and_many(self, samples: int, adapters: int) -> None:
        """Steps with as many tokens of one adapter and of many, in turns."""
        sides = [Measured("ours", samples, n) for n in (1, adapters)]
        self._ours(sides[1], seed=self.runs)  # opens the jobs, of which the single adapter's is one
        for run in range(self.runs):
            for side in sides if run % 2 == 0 else reversed(sides):
                side.runs.append(self._ours(side, run)["seconds"])
        self._note(*sides)

    def against_trl(self, peer: Worker, name: str, samples: int) -> None:
        """Steps of one adapter on both sides, in turns; the first of each side is for its memory."""
        ours, theirs = Measured(f"ours beside {name}", samples), Measured(name, samples)
        ours.peak_bytes = self._ours(ours, self.runs)["peak_bytes"]
        theirs.peak_bytes = self._theirs(peer, theirs, self.runs)["peak_bytes"]
        for run in range(self.runs):
            ours.runs.append(self._ours(ours, run)["seconds"])
            theirs.runs.append(self._theirs(peer, theirs, run)["seconds"])
        self._note(ours, theirs)

    def _ours(self, side: Measured, seed: int) -> dict[str, Any]:
        step = make_step(side.samples, self._vocabulary, seed)
        return _checked(side, self.ours.ask({"jobs": side.adapters, **step}))

    def _theirs(self, peer: Worker, side: Measured, seed: int) -> dict[str, Any]:
        return _checked(side, peer.ask(make_step(side.samples, self._vocabulary, seed)))

    def _note(self, *sides: Measured) -> None:
        self.measured += sides
        for side in sides:
            print(json.dumps(side.row()), flush=True)


def _checked(side: Measured, answer: dict[str, Any]) -> dict[str, Any]:
    trained = answer["trained_tokens"]
    assert trained == side.samples * NEW, f"{side.side} trained {trained} tokens instead of {side.samples * NEW}"
    return answer


def summary(measured: Sequence[Measured]) -> dict[str, float]:
    """The ratios of what was measured; those whose sides are missing are left out."""
    ratios = {}
    many = [m for m in measured if m.adapters > 1]
    if many:
        single = next(m for m in measured if m.side == "ours" and m.adapters == 1 and m.samples == many[0].samples)
        ratios["mixed_over_single"] = median(a / b for a, b in zip(many[0].runs, single.runs, strict=True))
    at_headline = {m.side: m for m in measured if m.samples == AGAINST_TRL}
    ways = [way for way in (trl_name(AGAINST_TRL), trl_name(PASS)) if way in at_headline]
    if ways:
        fastest = min(ways, key=lambda way: median(at_headline[way].runs))
        ours, theirs = at_headline[f"ours beside {fastest}"], at_headline[fastest]
        ratios["ours_over_peft"] = median(b / a for a, b in zip(ours.runs, theirs.runs, strict=True))
    for name, way in (
        ("peak_memory_over_peft", trl_name(AGAINST_TRL)),
        ("peak_memory_over_peft_in_passes", trl_name(PASS)),
    ):
        peaks = [at_headline[side].peak_bytes for side in (f"ours beside {way}", way) if side in at_headline]
        if len(peaks) == 2 and peaks[0] is not None and peaks[1]:
            ratios[name] = peaks[0] / peaks[1]
    return ratios


def trl_name(microbatch: int) -> str:
    """The name of TRL's side with so many samples a pass."""
    return f"trl, {microbatch} a pass"


@contextlib.contextmanager
def our_worker(model: str, threads: int) -> Any:
    """Our side's process."""
    job = {
        "model": model,
        "threads": threads,
        "rank": RANK,
        "slots": MIXED,
        "train_tokens": PoolSpec().train_tokens,
    }
    with Worker("bench.train_worker", job, threads) as worker:
        yield worker


def trl_job(model: str, threads: int, samples: int, microbatch: int) -> dict[str, Any]:
    """The job of `peers/trl_step.py`."""
    return {
        "model": str(resolve_model(model, ModelSpec().cache.expanduser()).absolute()),
        "threads": threads,
        "lora": {"rank": RANK, "alpha": 2 * RANK, "targets": list(TARGETS)},
        "samples": samples,
        "group": GROUP,
        "completion": NEW,
        "microbatch": microbatch,
    }


def compare_with_trl(
    model: str, threads: int, runs: int, samples: Sequence[int]
) -> tuple[list[Measured], Mapping[str, Any]]:
    """Both sides at each number of samples, in each of TRL's ways, with fresh processes; and the peer's versions."""
    here = Path(__file__).parent / "peers"
    python = peer_python("trl", read_requirements(here / "trl-requirements.txt"))
    measured: list[Measured] = []
    versions: Mapping[str, Any] = {}
    for count in samples:
        for microbatch in (PASS, min(count, AGAINST_TRL)):
            job = trl_job(model, threads, count, microbatch)
            with (
                our_worker(model, threads) as ours,
                Worker("bench.peers.trl_step", job, threads, python) as peer,
            ):
                bench = Bench(ours, runs)
                bench.against_trl(peer, trl_name(microbatch), count)
                measured += bench.measured
                versions = peer.ready["versions"]
    return measured, versions


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.train_step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="against TRL at 64 samples only")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there")
    parser.add_argument("--threads", type=int, default=2, help="of every side")
    parser.add_argument("--runs", type=int, default=RUNS, help="of each step and side")
    parser.add_argument("--adapters", type=int, default=MIXED, help="of the mixed step, a group each")
    parser.add_argument("--samples", type=int, nargs="*", help="of the steps against TRL; none: not against TRL")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what a fleet's model.source may be")
    options = parser.parse_args(arguments)
    if any(samples % GROUP for samples in options.samples or []):
        parser.error(f"--samples: {options.samples} must be multiples of {GROUP}")
    samples = options.samples
    if samples is None:
        samples = [AGAINST_TRL] if options.quick else [AGAINST_TRL, MIXED * GROUP]
    with our_worker(options.model, options.threads) as ours:
        bench = Bench(ours, options.runs)
        bench.one_adapter_and_many(options.adapters * GROUP, options.adapters)
    measured, versions, missing = bench.measured, {}, {}
    try:
        if samples:
            with_trl, versions = compare_with_trl(options.model, options.threads, options.runs, samples)
            measured += with_trl
    except (subprocess.CalledProcessError, WorkerFailed) as error:
        missing["trl"] = str(error)
        print(f"TRL is not measured: {error}", flush=True)
    found = [m.row() for m in measured]
    ratios = summary(measured)
    table(found, COLUMNS, "training steps")
    table([{"ratio": name, "median": value} for name, value in ratios.items()], ["ratio", "median"], "ratios")
    write_json(options.json, "train_step", found, ratios, peers={"trl": versions}, not_run=missing)


if __name__ == "__main__":
    main()
