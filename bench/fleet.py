"""Many tenants on one pool, against the same jobs one after another, in time slices, and through TRL.

python -m bench.fleet [--quick] [--workload tool] [--model FOLDER] [--json PATH]

Every mode runs the product as users run it: flows on a Prefect server, artifacts in a store, metrics in MLflow. Tokens
are equal on all sides: each completion has a drawn length that is imposed, whatever the model says.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.common import median, table, write_json
from bench.model import small_model
from bench.workloads import WORKLOADS, Workload, with_steps
from marlaas.fleet_files import parse_fleet
from marlaas.pool import LocalPool, Pool
from marlaas.pool.protocol import AdapterLease
from marlaas.sampling.protocol import Sample, SamplingRequest
from marlaas.services import start_services
from marlaas.specs import FleetSpec, ServicesSpec
from marlaas.training.batch import TrainingBatch, UpdateResult

TENANTS = (1, 2, 4, 8, 16, 32)
LORA = {"rank": 8, "alpha": 16}
COLUMNS = [
    "workload",
    "mode",
    "tenants",
    "wall_seconds",
    "busy_share",
    "device_seconds",
    "sampled_tokens",
    "tokens_per_second",
]
# The same allocator settings as the engine's own, for the peer.
PEER_VARIABLES = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}


@dataclass(frozen=True)
class Measured:
    """One run. busy_share: of the device's time; device_seconds: its sum."""

    workload: str
    mode: str
    tenants: int
    wall_seconds: float
    busy_share: float | None
    device_seconds: float | None
    sampled_tokens: int
    scheduling_seconds: float | None = None

    def row(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_second": self.sampled_tokens / self.wall_seconds}


class BenchPool:
    """A pool that imposes the drawn lengths; in slices, one tenant's stage has the device at a time."""

    def __init__(self, pool: LocalPool, workload: Workload) -> None:
        self._pool, self.workload = pool, workload
        self.slices = False
        self._device = asyncio.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    @contextlib.asynccontextmanager
    async def lease(self, job: str) -> AsyncIterator[AdapterLease]:
        async with self._stage(), self._pool.lease(job) as held:
            yield held

    async def update(self, batch: TrainingBatch) -> UpdateResult:
        async with self._stage():
            return await self._pool.update(batch)

    async def generate(self, request: SamplingRequest) -> Sample:
        turn = len(request.prompt)  # grows with each turn, so that turns differ
        drawn = hashlib.blake2b(f"{request.seed} {turn}".encode(), digest_size=8).digest()
        length = int(self.workload.lengths(int.from_bytes(drawn, "big") >> 1).flat[0])
        imposed = replace(request, max_tokens=length, stop_ids=frozenset(), stop=())
        return await self._pool.generate(imposed)

    @contextlib.asynccontextmanager
    async def _stage(self) -> AsyncIterator[None]:
        if not self.slices:
            yield
            return
        async with self._device:
            yield


class Bench:
    """A workload on one pool, with the services and a store."""

    def __init__(self, workload: Workload, model: str, dtype: str, pool: BenchPool, folder: Path) -> None:
        self.workload, self.model, self.dtype, self.pool, self.folder = workload, model, dtype, pool, folder
        self._runs = 0

    def fleet(self, first: int, count: int) -> FleetSpec:
        """A fleet of `count` tenants, of which the first is number `first`, under names of its own."""
        w = self.workload
        self._runs += 1
        latency = [w.latency.median, w.latency.sigma, w.latency.low, w.latency.high]
        sizes = {"turns": w.turns, "prompt_bytes": w.prompt_bytes, "answer_bytes": w.answer_bytes}
        environment = {
            "kind": "custom",
            "entry": "fleet_environment:Fleet",
            "path": str(Path(__file__).parent.absolute()),
            "arguments": sizes | {"latency": latency},
            "concurrency": 512,
            "timeout_seconds": 60,
        }
        tenant = {
            "environment": environment,
            "lora": LORA,
            "group_size": w.group,
            "prompts_per_step": w.prompts,
            "steps": w.steps,
            "sampling": {"max_tokens": int(w.tokens.high)},
            "publish_every": w.steps,
            "max_staleness": 1,
            "evaluation": {"enabled": False},
        }
        numbers = range(first, first + count)
        document = {
            "name": f"run{self._runs}",
            "model": {"source": self.model, "dtype": self.dtype},
            "pool": pool_spec(w),
            "store": {"url": str(self.folder / "store")},
            "tenants": [{"name": f"t{i:02d}", "seed": i, **tenant} for i in numbers],
        }
        return parse_fleet(document)

    async def run(self, mode: str, tenants: int, first: int = 0) -> Measured:
        """Runs tenants from number `first` on, from the first rollout to the last publication."""
        from flows.train_fleet import train_fleet

        self.pool.slices = mode == "slices"
        fleet = self.fleet(first, tenants)
        before, started = await self._device(), time.perf_counter()
        rows = await train_fleet(fleet)
        assert all("error" not in row for row in rows), rows
        wall = time.perf_counter() - started
        after = await self._device()
        busy, sampled, scheduling = (now - then for now, then in zip(after, before, strict=True))
        return Measured(self.workload.name, mode, tenants, wall, busy / wall, busy, int(sampled), scheduling)

    async def _device(self) -> tuple[float, float, float]:
        stats = await self.pool.stats()
        [device] = stats.devices
        sampled = sum(t.sampled_tokens for t in stats.tenants.values())
        return device.sampling_seconds + device.training_seconds, sampled, device.scheduling_seconds


def pool_spec(workload: Workload) -> dict[str, Any]:
    longest = workload.longest
    return {
        "max_rank": LORA["rank"],
        "max_adapters": 32,
        "max_sequences": 256,
        "max_sequence_tokens": longest,
        "kept_tokens": 32 * 2 * workload.conversations * longest,
        "train_tokens": 8192,
        # Flows, servers and environments run beside the device; with two threads on two cores each step would wait
        # for whoever has the other core.
        "threads": 1,
    }


def through_trl(workload: Workload, model: Path, dtype: str, jobs: int) -> Measured:
    """`jobs` of the jobs through TRL's GRPOTrainer, one after another, in an environment of its own."""
    from transformers import AutoTokenizer

    from bench.peers.environment import peer_python, read_requirements

    here = Path(__file__).parent / "peers"
    python = peer_python("trl", read_requirements(here / "trl-requirements.txt"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    wall, sampled = 0.0, 0
    for job in range(jobs):
        with tempfile.TemporaryDirectory() as folder:
            asked, answered = Path(folder) / "job.json", Path(folder) / "out.json"
            asked.write_text(json.dumps(trl_job(workload, model, dtype, tokenizer, job)))
            command = [str(python), str(here / "trl_job.py"), str(asked), "--json", str(answered)]
            done = subprocess.run(command, env={**os.environ, **PEER_VARIABLES}, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"TRL's job failed:\n{done.stderr[-2000:]}")
            out = json.loads(answered.read_text())
        wall += out["wall_seconds"]
        sampled += out["sampled_tokens"]
    return Measured(workload.name, "trl", jobs, wall, None, None, sampled)


def trl_job(workload: Workload, model: Path, dtype: str, tokenizer: Any, seed: int) -> dict[str, Any]:
    """The job file of `bench/peers/trl_job.py`: prompts, lengths and tool times as our own side has them."""
    import numpy as np
    import torch

    w = workload
    question = [f"training {seed} {i} ".ljust(w.prompt_bytes, "?") for i in range(w.steps * w.prompts)]
    chats = [[{"role": "user", "content": q}] for q in question]
    texts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
    tool = f"<|im_end|>\n<|im_start|>tool\n{'a' * w.answer_bytes}<|im_end|>\n<|im_start|>assistant\n"
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    rewards = np.random.default_rng([seed, 3]).integers(0, 2, (w.steps * w.prompts, w.group))
    return {
        "model": str(model.absolute()),
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "lora": {**LORA, "targets": targets},
        "steps": w.steps,
        "prompts_per_step": w.prompts,
        "group_size": w.group,
        "prompts": [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts],
        "turns": w.turns,
        "tokens": w.lengths(seed).tolist(),
        "tool_tokens": tokenizer(tool, add_special_tokens=False)["input_ids"],
        "latency": w.waits(seed).tolist(),
        "rewards": rewards.astype(float).tolist(),
        "learning_rate": 1e-4,
        "temperature": 1.0,
        "max_tokens": int(w.tokens.high),
    }


async def without_orchestration(bench: Bench, tenants: int) -> float:
    """Wall seconds of the same fleet on the same pool, without flows, store and tracking."""
    from bench.tenants import run_tenant
    from marlaas.environments import open_environment

    fleet = bench.fleet(0, tenants)
    bench.pool.slices = False
    environments = [open_environment(t.environment) for t in fleet.tenants]
    try:
        started = time.perf_counter()
        pool: Pool = bench.pool  # type: ignore[assignment]
        runs = (run_tenant(pool, t, e, t.steps) for t, e in zip(fleet.tenants, environments, strict=True))
        await asyncio.gather(*runs)
        return time.perf_counter() - started
    finally:
        await asyncio.gather(*(e.close() for e in environments))


@contextlib.contextmanager
def services(folder: Path) -> Iterator[None]:
    with start_services(ServicesSpec(state=folder / "services")) as running:
        os.environ.update(running.environment())
        os.environ["PREFECT_LOGGING_LEVEL"] = "CRITICAL"
        yield


async def measure(workload: Workload, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """All modes of one workload, on one pool that stays open."""
    import flows.runtime
    from flows.runtime import RUNTIME

    model, dtype = options.model or str(small_model()), "bfloat16"
    found: list[dict[str, Any]] = []

    def note(measured: Measured) -> Measured:
        found.append(measured.row())
        print(json.dumps(found[-1]), flush=True)
        return measured

    opened: list[BenchPool] = []

    def open_bench_pool(*arguments: Any) -> Any:
        opened.append(BenchPool(LocalPool(*arguments), workload))
        return opened[0]

    flows.runtime.open_pool = open_bench_pool  # type: ignore[assignment]
    first = Bench(workload, model, dtype, None, folder).fleet(0, 1)  # type: ignore[arg-type]
    async with RUNTIME.pool(first.model, first.pool):
        bench = Bench(workload, model, dtype, opened[0], folder / workload.name)
        warm = Bench(with_steps(workload, 1), model, dtype, opened[0], folder / "warm")
        await warm.run("together", min(4, max(options.tenants)))
        for repeat in range(options.repeat):
            # The largest fleet is what the ratios are about; smaller ones are run once, for the curve.
            for tenants in options.tenants if repeat == 0 else [max(options.tenants)]:
                note(await bench.run("together", tenants))
                if repeat == 0 and 1 < tenants <= options.slices:
                    note(await bench.run("slices", tenants))
        # Jobs one after another are one long run: its first n jobs are the run of n tenants.
        for tenant in range(max(options.tenants)):
            note(await run_one(bench, tenant))
        seconds = [await without_orchestration(bench, max(options.tenants)) for _ in range(options.repeat)]
        found.append(
            {
                "workload": workload.name,
                "mode": "pool alone",
                "tenants": max(options.tenants),
                "wall_seconds": median(seconds),
            }
        )
        print(json.dumps(found[-1]), flush=True)
    if options.trl:
        note(through_trl(workload, Path(first.model.source), dtype, options.trl))
    return found


async def run_one(bench: Bench, tenant: int) -> Measured:
    """Tenant number `tenant` by itself."""
    measured = await bench.run("sequential", 1, tenant)
    return replace(measured, mode=f"alone-{tenant}")


def summary(
    found: Sequence[Mapping[str, Any]], tenants: Sequence[int]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows by mode and tenants (medians), and the ratios at the largest fleet."""
    rows, ratios = [], {}
    for workload in dict.fromkeys(str(r["workload"]) for r in found):
        mine = [r for r in found if r["workload"] == workload]
        alone = [r for r in mine if r["mode"].startswith("alone-")]
        for n in tenants:
            for mode in ("together", "slices"):
                runs = [r for r in mine if r["mode"] == mode and r["tenants"] == n]
                if runs:
                    rows.append(_median_row(runs))
            rows.append(_sum_row(alone[:n], "sequential", n))
        most = max(tenants)
        by_mode = {r["mode"]: r for r in rows if r["workload"] == workload and r["tenants"] == most}
        together, sequential = by_mode["together"], by_mode["sequential"]
        prefix = "" if workload == "tool" else f"{workload}_"
        ratios[f"{prefix}together_over_sequential"] = together["wall_seconds"] / sequential["wall_seconds"]
        ratios[f"{prefix}busy_share_gain"] = together["busy_share"] / sequential["busy_share"]
        if "slices" in by_mode:
            ratios[f"{prefix}together_over_slices"] = together["wall_seconds"] / by_mode["slices"]["wall_seconds"]
        bare = [r for r in mine if r["mode"] == "pool alone"]
        if bare:
            ratios[f"{prefix}orchestration_share"] = 1 - bare[0]["wall_seconds"] / together["wall_seconds"]
        ratios[f"{prefix}scheduling_share"] = together["scheduling_seconds"] / together["wall_seconds"]
        peer = [r for r in mine if r["mode"] == "trl"]
        if peer:
            rows.append(dict(peer[0]))
            all_jobs = peer[0]["wall_seconds"] * most / peer[0]["tenants"]
            ratios[f"{prefix}trl_over_together"] = all_jobs / together["wall_seconds"]
    return rows, ratios


def _median_row(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    middle = sorted(runs, key=lambda r: r["wall_seconds"])[len(runs) // 2]
    return dict(middle) | {
        "runs": len(runs),
        "wall_range": [min(r["wall_seconds"] for r in runs), max(r["wall_seconds"] for r in runs)],
    }


def _sum_row(alone: Sequence[Mapping[str, Any]], mode: str, tenants: int) -> dict[str, Any]:
    wall, busy = (sum(r[k] for r in alone) for k in ("wall_seconds", "device_seconds"))
    tokens = sum(r["sampled_tokens"] for r in alone)
    return {
        "workload": alone[0]["workload"],
        "mode": mode,
        "tenants": tenants,
        "wall_seconds": wall,
        "busy_share": busy / wall,
        "device_seconds": busy,
        "sampled_tokens": tokens,
        "tokens_per_second": tokens / wall,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=[*WORKLOADS, "both"], default="both")
    parser.add_argument("--tenants", type=lambda text: [int(n) for n in text.split(",")], default=list(TENANTS))
    parser.add_argument("--steps", type=int, help="of each tenant")
    parser.add_argument("--repeat", type=int, default=3, help="runs of `together`, of which the median counts")
    parser.add_argument("--slices", type=int, default=8, help="the most tenants that are run in time slices")
    parser.add_argument("--model", help="folder or alias, instead of the small one")
    parser.add_argument(
        "--trl", type=int, default=2, help="how many of the jobs TRL runs; the others are taken to last as long"
    )
    parser.add_argument("--quick", action="store_true", help="fewer fleets, one run each")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.tenants, options.repeat, options.trl = [1, 8, 32], 1, min(1, options.trl)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="marlaas-bench-") as folder, services(Path(folder)):
        for name in WORKLOADS if options.workload == "both" else [options.workload]:
            workload = WORKLOADS[name] if options.steps is None else with_steps(WORKLOADS[name], options.steps)
            found += asyncio.run(measure(workload, options, Path(folder)))
    rows, ratios = summary(found, options.tenants)
    table(rows, COLUMNS)
    table([{"ratio": k, "value": v} for k, v in ratios.items()], ["ratio", "value"])
    write_json(options.json, "fleet", rows, ratios, runs=found)


if __name__ == "__main__":
    main()
