"""What tenants do to each other on a shared pool: fair shares, disturbances, the cost of scheduling, memory."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.common import machine, table, versions, write_json
from bench.environments import (
    HangingGame,
    LetterGame,
    NanGame,
    RaisingGame,
    ToolGame,
    within_limits,
)
from bench.tenants import TenantResult, TenantStep, run_tenant
from marlaas.environments import Environment
from marlaas.pool import LocalPool
from marlaas.pool.stats import DeviceStats, TenantStats
from marlaas.specs import LatencySpec, ModelSpec, PoolSpec, TenantSpec

TENANTS = 8
SHARE_TENANTS = 32
MEMORY_TENANTS = 4
PROMPTS, GROUP, STALENESS, TURNS = 4, 4, 1, 2
DEMAND = PROMPTS * GROUP * (STALENESS + 1)  # conversations of one tenant at once
LETTERS = "abcdefghijklmnopqrstuvwxyz"  # so many that hardly a group is without a signal
TOOL = LatencySpec(median_seconds=0.05, sigma=0.6, min_seconds=0.02, max_seconds=0.15)
SLOW_TOOL = LatencySpec(median_seconds=30, sigma=0, min_seconds=30, max_seconds=30)
HANG_SECONDS = 3.0  # after which a hung call is given up
WEIGHTS = (1.0, 2.0, 4.0)
SATURATED = 0.9  # busy share of a device that is the bottleneck
# Leaves out the space around earlier replies, so that some conversations cannot be one sequence of tokens.
TRIMMING_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}\n{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Settings:
    """How much is measured. Seconds of each run; warmup comes before its window."""

    model: ModelSpec
    threads: int
    warmup: float
    window: float
    repeats: int
    memory_steps: int


@dataclass(frozen=True)
class Player:
    """A tenant and the environment that it brings."""

    spec: TenantSpec
    environment: Environment


@dataclass(frozen=True)
class Window:
    """What happened in a window: differences of the pool's own counts, and the steps that ended in it."""

    seconds: float
    device: DeviceStats
    tenants: dict[str, TenantStats]
    steps: dict[str, int]
    failures: dict[str, Counter[str]]

    @property
    def busy(self) -> float:
        """The device's busy share."""
        return self.busy_seconds / self.seconds

    @property
    def busy_seconds(self) -> float:
        d = self.device
        return d.sampling_seconds + d.training_seconds + d.scheduling_seconds

    def step_rate(self, names: Sequence[str]) -> float:
        """Steps a second of these tenants."""
        return sum(self.steps[name] for name in names) / self.seconds

    def token_rate(self, names: Sequence[str]) -> float:
        """Sampled and trained tokens a second of these tenants."""
        of = [self.tenants[name] for name in names]
        return sum(t.sampled_tokens + t.trained_tokens for t in of) / self.seconds

    def device_seconds(self, names: Sequence[str]) -> list[float]:
        return [self.tenants[name].device_seconds for name in names]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.isolation", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one run of each pair, shorter windows")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there")
    parser.add_argument("--model", default="tiny-random", help="what a fleet file's model.source may be")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=1, help="of the device; default 1")
    parser.add_argument("--warmup", type=float, help="seconds; default 5, quick 3")
    parser.add_argument("--window", type=float, help="seconds; default 30, quick 12")
    parser.add_argument("--repeats", type=int, help="pairs of runs; default 3, quick 1")
    parser.add_argument("--memory-steps", type=int, help="of each of four tenants; default 200, quick 100")
    options = parser.parse_args(arguments)
    defaults = (3.0, 12.0, 1, 100) if options.quick else (5.0, 30.0, 3, 200)
    given = (options.warmup, options.window, options.repeats, options.memory_steps)
    chosen = [default if value is None else value for value, default in zip(given, defaults, strict=True)]
    settings = Settings(ModelSpec(source=options.model, dtype=options.dtype), options.threads, *chosen)
    rows, ratios = asyncio.run(measure(settings))
    report(rows, ratios)
    if options.json is not None:
        write_json(options.json, "isolation", rows, ratios)
