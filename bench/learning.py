"""Whether a tenant learns among others what it learns alone: curves of the same recipes in both settings.

A recipe is trained with several seeds, each alone in a pool of its own; then all of them at once as tenants of one
pool that other recipes share. Differences are paired by seed. They count as none when a two one-sided t-test (TOST,
Schuirmann 1987) shows the mean difference to be within one standard deviation of the lone runs over their seeds.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from bench.common import table, write_json
from bench.environments import LetterGame, ToolGame, within_limits
from bench.tenants import TenantResult, run_tenant
from marlaas.environments import Environment
from marlaas.pool import LocalPool
from marlaas.specs import TARGETS, LatencySpec, ModelSpec, PoolSpec, TenantSpec

LAST = 5  # steps whose mean reward is the final one
LEVEL = 0.05
TARGET = "aeiou"
TOOL = LatencySpec(median_seconds=0.05, sigma=0.6, min_seconds=0.02, max_seconds=0.3)
OTHER_TARGETS = ("abcdefghijklm", "xyz", "0123456789", "e", "ABCDEFGH", "nopqrstuvwxyz", ".,;:")
OTHER_MODULES: tuple[tuple[str, ...], ...] = (TARGETS, TARGETS[:4], ("q_proj", "v_proj"), TARGETS[4:])


@dataclass(frozen=True)
class Settings:
    """What is trained: `seeds` runs of `steps` steps, alone and among `tenants` in all."""

    model: ModelSpec
    threads: int
    seeds: int
    steps: int
    tenants: int


def tenant(name: str, steps: int, **fields: Any) -> TenantSpec:
    """The recipe, and what differs from it."""
    custom = {"kind": "custom", "entry": "bench.environments:LetterGame", "concurrency": 4096}
    recipe = {
        "name": name,
        "environment": custom,
        "prompts_per_step": 4,
        "group_size": 16,
        "steps": steps,
        "sampling": {"max_tokens": 16},
        "lora": {"rank": 8, "alpha": 32},
        "optimizer": {"learning_rate": 0.006},
    }
    return TenantSpec.model_validate(recipe | fields)


def seeded(seed: int, settings: Settings, staleness: int) -> tuple[TenantSpec, Environment]:
    """The recipe with a seed."""
    spec = tenant(f"seed{seed}", settings.steps, seed=seed, max_staleness=staleness)
    return spec, within_limits(LetterGame(TARGET), spec.environment)


def other(index: int, settings: Settings) -> tuple[TenantSpec, Environment]:
    """A tenant with a recipe of its own: target, rank, modules, length, group, staleness, turns."""
    spec = tenant(
        f"other{index}",
        settings.steps,
        seed=1000 + index,
        lora={"rank": (2, 4, 8, 16)[index % 4], "alpha": 32, "targets": OTHER_MODULES[index % len(OTHER_MODULES)]},
        sampling={"max_tokens": (8, 12, 24)[index % 3]},
        prompts_per_step=(2, 4, 6)[index % 3],
        group_size=(4, 8)[index % 2],
        max_staleness=index % 3,
    )
    target = OTHER_TARGETS[index % len(OTHER_TARGETS)]
    game = ToolGame(target, 2, TOOL) if index % 2 else LetterGame(target)
    return spec, within_limits(game, spec.environment)


async def train(settings: Settings, seeds: Sequence[int], staleness: int, others: int) -> list[TenantResult]:
    """The recipe with these seeds in one pool, beside so many others, which go on until the last seed is done."""
    spec = PoolSpec(max_rank=16, max_sequence_tokens=256, threads=settings.threads)
    pool = await asyncio.to_thread(LocalPool, settings.model, spec)
    over = asyncio.Event()
    beside = [
        asyncio.create_task(run_tenant(pool, tenant, environment, None, until=over))
        for tenant, environment in (other(index, settings) for index in range(others))
    ]
    recipes = [seeded(seed, settings, staleness) for seed in seeds]
    try:
        return list(await asyncio.gather(*(run_tenant(pool, t, env, settings.steps) for t, env in recipes)))
    finally:
        over.set()
        await asyncio.gather(*beside)
        await pool.close()


@dataclass(frozen=True)
class Curves:
    """Mean reward of each step, `[seeds, steps]`, of the same seeds alone and among others."""

    alone: np.ndarray
    among: np.ndarray


async def measure(settings: Settings, staleness: int) -> Curves:
    """Trains every seed alone, one after another, and then all of them among others."""
    seeds = range(settings.seeds)
    alone = [(await train(settings, [seed], staleness, 0))[0] for seed in seeds]
    among = await train(settings, seeds, staleness, settings.tenants - settings.seeds)
    return Curves(*(np.array([result.rewards for result in results]) for results in (alone, among)))


MEASURES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "area": lambda curves: curves.mean(axis=1),
    "final": lambda curves: curves[:, -LAST:].mean(axis=1),
}


def compare(alone: np.ndarray, among: np.ndarray) -> dict[str, float]:
    """Paired values, `[seeds]` each: the mean difference, its 90% t-interval, and TOST within the lone runs' spread.

    spread: standard deviation of `alone` over its seeds, the margin of equivalence. p_equivalent: the larger one-sided
    p-value, so below 0.05 exactly when the 90% interval lies within the margin. p_mann_whitney: unpaired, two-sided.
    """
    difference, count = among - alone, len(alone)
    mean, spread = float(difference.mean()), float(alone.std(ddof=1))
    error = max(float(difference.std(ddof=1)) / count**0.5, np.finfo(float).tiny)
    half = float(stats.t.ppf(1 - LEVEL, count - 1)) * error
    return {
        "alone": float(alone.mean()),
        "among": float(among.mean()),
        "difference": mean,
        "low": mean - half,
        "high": mean + half,
        "spread": spread,
        "difference_over_spread": mean / spread,
        "p_equivalent": float(stats.t.sf((spread - abs(mean)) / error, count - 1)),
        "p_mann_whitney": float(stats.mannwhitneyu(alone, among).pvalue),
    }


def run(settings: Settings) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows of both stalenesses (comparisons, then curves by seed), and the ratios, which are of staleness 1."""
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for staleness in (1, 0):
        curves = asyncio.run(measure(settings, staleness))
        about = {"max_staleness": staleness}
        for name, of in MEASURES.items():
            found = compare(of(curves.alone), of(curves.among))
            rows.append({"what": name, **about, **found})
            if staleness == 1:
                ratios[f"learning_{name}_difference_over_spread"] = found["difference_over_spread"]
        rows += [
            {"what": "curve", **about, "seed": seed, "alone": alone.tolist(), "among": among.tolist()}
            for seed, (alone, among) in enumerate(zip(curves.alone, curves.among, strict=True))
        ]
        if staleness == 0:
            ratios["on_policy_largest_reward_difference"] = float(np.abs(curves.among - curves.alone).max())
    return rows, ratios


def report(rows: Sequence[dict[str, Any]], ratios: dict[str, float]) -> None:
    """Prints the curves' means and ranges, and the comparisons."""
    for staleness in (1, 0):
        mine = [row for row in rows if row["max_staleness"] == staleness]
        both = {kind: np.array([row[kind] for row in mine if row["what"] == "curve"]) for kind in ("alone", "among")}
        steps = both["alone"].shape[1]
        shown = [
            {"step": step} | {k: f"{v.mean():.3f} ({v.min():.3f} to {v.max():.3f})" for k, v in at.items()}
            for step in sorted({*range(0, steps, 3), steps - 1})
            for at in [{kind: curves[:, step] for kind, curves in both.items()}]
        ]
        table(shown, ["step", "alone", "among"], f"mean reward and its range over seeds, max_staleness {staleness}")
        columns = "what alone among difference low high spread difference_over_spread p_equivalent p_mann_whitney"
        title = f"among less alone, max_staleness {staleness}; equivalent within one spread if p_equivalent < {LEVEL}"
        table([row for row in mine if row["what"] != "curve"], columns.split(), title)
    table([{"ratio": name, "value": value} for name, value in ratios.items()], ["ratio", "value"], "ratios")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(prog="python -m bench.learning", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three seeds")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there")
    parser.add_argument("--model", default="tiny-random", help="what a fleet's model.source may be")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=1, help="of the device")
    parser.add_argument("--seeds", type=int, help="at least 2; default 5, quick 3")
    parser.add_argument("--steps", type=int, default=25, help="of each seed")
    parser.add_argument("--tenants", type=int, default=32, help="in the shared pool, the seeds among them")
    options = parser.parse_args(arguments)
    seeds = options.seeds or (3 if options.quick else 5)
    if not 2 <= seeds <= options.tenants:
        parser.error(f"--seeds: {seeds} must be from 2 to --tenants {options.tenants}")
    model = ModelSpec(source=options.model, dtype=options.dtype)
    rows, ratios = run(Settings(model, options.threads, seeds, options.steps, options.tenants))
    report(rows, ratios)
    write_json(options.json, "learning", rows, ratios)


if __name__ == "__main__":
    main()
