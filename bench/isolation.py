"""What tenants do to each other on a shared pool: fair shares, disturbances, the cost of scheduling, memory.

Eight equal tenants keep one device busy. Each disturbance replaces the last of them; what the other seven get then
is compared with what they get of the eight equal ones, in pairs of runs of alternating order.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.common import median, table, write_json
from bench.players import DEMAND, DISTURBANCES, WEIGHTED_PLACES, Player, equal, weighted
from bench.tenants import TenantResult, TenantStep, run_tenant
from marlaas.errors import MarlaasError
from marlaas.pool import LocalPool
from marlaas.pool.stats import PoolStats, TenantStats
from marlaas.specs import ModelSpec, PoolSpec

EQUALS, SHARING, REMEMBERED = 8, 32, 4  # tenants of the fairness, scheduling and memory runs
WEIGHTS = (1.0, 2.0, 4.0)
SATURATED = 0.9  # busy share of a device that is the bottleneck
BARS = {  # at least, or at most
    **{f"others_under_{name}": (">=", 0.9) for name in DISTURBANCES},
    "jain_equal": (">=", 0.95),
    "jain_weighted": (">=", 0.95),
    "scheduling_share": ("<", 0.02),
}
SAMPLE_EVERY = 10  # steps between samples of the resident memory
# Leaves out the space around earlier replies, so that some conversations cannot be one sequence of tokens.
TRIMMING_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}\n{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)


Measured = tuple[list[dict[str, Any]], dict[str, float]]
"""Rows and ratios."""


@dataclass(frozen=True)
class Settings:
    """How much is measured. Each run is `warmup` and then `window` seconds; repeats: runs of each kind.

    places: in the batch of the disturbance runs, for each conversation that eight equal tenants may have at once.
    """

    model: ModelSpec
    threads: int
    warmup: float
    window: float
    repeats: int
    memory_steps: int
    places: float


@dataclass(frozen=True)
class Window:
    """What happened between two looks at a pool. steps: that ended meanwhile. failures: since the tenant began."""

    seconds: float
    before: PoolStats
    after: PoolStats
    steps: dict[str, int]
    failures: dict[str, int]

    def gained(self, name: str, field: str) -> float:
        """By how much a tenant's count has grown."""
        before, after = (stats.tenants.get(name, TenantStats()) for stats in (self.before, self.after))
        return getattr(after, field) - getattr(before, field)

    def spent(self, *kinds: str) -> float:
        """Seconds that the device spent on `sampling`, `training` or `scheduling`."""
        (before,), (after,) = self.before.devices, self.after.devices
        return sum(getattr(after, f"{kind}_seconds") - getattr(before, f"{kind}_seconds") for kind in kinds)

    @property
    def busy_seconds(self) -> float:
        return self.spent("sampling", "training", "scheduling")

    def device_seconds(self, names: Sequence[str]) -> list[float]:
        """Each tenant's."""
        return [self.gained(name, "device_seconds") for name in names]

    def tokens_per_second(self, names: Sequence[str]) -> float:
        """Sampled and trained, of these tenants together."""
        kinds = ("sampled_tokens", "trained_tokens")
        return sum(self.gained(name, kind) for name in names for kind in kinds) / self.seconds

    def steps_per_second(self, names: Sequence[str]) -> float:
        """Of these tenants together."""
        return sum(self.steps[name] for name in names) / self.seconds

    def reused_share(self, names: Sequence[str]) -> float:
        """Of these tenants' prompt tokens, those whose keys and values were kept from the turn before."""
        reused, computed = (
            sum(self.gained(name, field) for name in names) for field in ("reused_tokens", "prefilled_tokens")
        )
        return reused / max(1.0, reused + computed)


# Measuring


@asynccontextmanager
async def opened(settings: Settings, max_sequences: int) -> AsyncIterator[LocalPool]:
    """A pool with so many places in its batch."""
    spec = PoolSpec(max_rank=8, max_sequences=max_sequences, max_sequence_tokens=256, threads=settings.threads)
    pool = await asyncio.to_thread(LocalPool, settings.model, spec)
    try:
        yield pool
    finally:
        await pool.close()


async def observe(settings: Settings, players: Sequence[Player], max_sequences: int) -> Window:
    """Runs the players on a pool of their own and looks at a window. Who fails comes back at once."""
    async with opened(settings, max_sequences) as pool:
        stop = asyncio.Event()
        runs = [
            asyncio.create_task(run_tenant(pool, p.spec, p.environment, None, until=stop, restarts=True))
            for p in players
        ]
        try:
            await asyncio.sleep(settings.warmup)
            before, began = await pool.stats(), time.perf_counter()
            await asyncio.sleep(settings.window)
            after, ended = await pool.stats(), time.perf_counter()
        finally:
            stop.set()
            results: list[TenantResult] = await asyncio.gather(*runs)
    steps = {r.name: sum(began < step.ended <= ended for step in r.steps) for r in results}
    return Window(ended - began, before, after, steps, {r.name: r.failures.total() for r in results})


async def measure_disturbances(settings: Settings) -> Measured:
    """The seven others' rates beside each disturbance over those beside an equal; and the equals' fairness."""
    others = [equal(index) for index in range(EQUALS - 1)]
    names = [player.spec.name for player in others]
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    fairness: list[float] = []
    for position, (name, disturber) in enumerate(DISTURBANCES.items()):
        pairs: list[dict[str, Any]] = []
        for repeat in range(settings.repeats):
            windows: dict[str, Window] = {}
            kinds = {"fair": equal(EQUALS - 1), "disturbed": disturber()}
            for kind in sorted(kinds, reverse=(position + repeat) % 2 == 0):
                windows[kind] = await observe(
                    settings, [*others, kinds[kind]], round(settings.places * EQUALS * DEMAND)
                )
            fair, disturbed = windows["fair"], windows["disturbed"]
            everybody = [*names, kinds["fair"].spec.name]
            fairness.append(jain(fair.device_seconds(everybody)))
            row = {
                "what": f"others_under_{name}",
                "repeat": repeat,
                "tokens": _ratio(disturbed.tokens_per_second(names), fair.tokens_per_second(names)),
                "steps": _ratio(disturbed.steps_per_second(names), fair.steps_per_second(names)),
                "fair_tokens_per_second": fair.tokens_per_second(names),
                "fair_busy": fair.busy_seconds / fair.seconds,
                "disturbed_busy": disturbed.busy_seconds / disturbed.seconds,
                "disturber_device_share": disturbed.device_seconds([kinds["disturbed"].spec.name])[0]
                / sum(disturbed.device_seconds([*names, kinds["disturbed"].spec.name])),
                "fair_reused_share": fair.reused_share(names),
                "disturbed_reused_share": disturbed.reused_share(names),
                "disturber_failures": disturbed.failures[kinds["disturbed"].spec.name],
                "others_failures": sum(disturbed.failures[other] for other in names),
                "jain": fairness[-1],
            }
            pairs.append(row)
        rows += pairs
        ratios[f"others_under_{name}"] = median(row["tokens"] for row in pairs)
    return rows, ratios | {"jain_equal": median(fairness)}


async def measure_weights(settings: Settings) -> Measured:
    """Device seconds of three and of eight tenants of weights 1, 2 and 4, with a tenth of the places they ask for.

    Places are dealt by weight, and tokens follow; seconds differ from tokens by prompts that are computed for fewer
    samples at once, and by whole updates at the window's ends.
    """
    rows: list[dict[str, Any]] = []
    for repeat in range(settings.repeats):
        for count in (len(WEIGHTS), EQUALS):
            weights = [WEIGHTS[index % len(WEIGHTS)] for index in range(count)]
            players = [weighted(index, weight) for index, weight in enumerate(weights)]
            window = await observe(settings, players, count * WEIGHTED_PLACES)
            names = [player.spec.name for player in players]
            normal = by_weight(window.device_seconds(names), weights)
            rows.append(
                {
                    "what": f"weights_of_{count}",
                    "repeat": repeat,
                    "jain": jain(normal),
                    "shares_by_weight": " ".join(f"{n:.2f}" for n in normal),
                    "largest_deviation": max(abs(n - 1) for n in normal),
                    "jain_of_tokens": jain(by_weight([window.gained(n, "sampled_tokens") for n in names], weights)),
                    "fair_busy": window.busy_seconds / window.seconds,
                }
            )
    of_three, of_eight = (
        [row for row in rows if row["what"] == f"weights_of_{count}"] for count in (len(WEIGHTS), EQUALS)
    )
    return rows, {
        "jain_weighted": median(row["jain"] for row in of_eight),
        "weights_largest_deviation": median(row["largest_deviation"] for row in of_three),
    }


async def measure_scheduling(settings: Settings) -> Measured:
    """What the device thread spends on deciding while 32 tenants keep it busy; waits for the interpreter included."""
    rows: list[dict[str, Any]] = []
    for repeat in range(settings.repeats):
        window = await observe(settings, [equal(index) for index in range(SHARING)], PoolSpec().max_sequences)
        rows.append(
            {
                "what": "scheduling",
                "repeat": repeat,
                "of_busy": window.spent("scheduling") / window.busy_seconds,
                "of_wall": window.spent("scheduling") / window.seconds,
                "fair_busy": window.busy_seconds / window.seconds,
            }
        )
    return rows, {"scheduling_share": median(row["of_busy"] for row in rows)}


async def measure_memory(settings: Settings) -> Measured:
    """Resident memory while four tenants train, every tenth step after the first quarter; a line through it."""
    process, taken = psutil.Process(), itertools.count(1)
    samples: list[tuple[int, float]] = []

    def sample(step: TenantStep) -> None:
        steps, rest = divmod(next(taken), REMEMBERED)
        if rest == 0 and steps % SAMPLE_EVERY == 0:
            samples.append((steps, process.memory_info().rss / 2**20))

    async with opened(settings, REMEMBERED * DEMAND) as pool:
        pool.tokenizer.chat_template = TRIMMING_TEMPLATE
        players = [equal(index) for index in range(REMEMBERED)]
        results = await asyncio.gather(
            *(run_tenant(pool, p.spec, p.environment, settings.memory_steps, on_step=sample) for p in players)
        )
        left = await pool.stats()
    warm = [(step, size) for step, size in samples if step > settings.memory_steps / 4]
    steps, sizes = np.array(warm).T
    slope = float(np.polyfit(steps, sizes, 1)[0])
    row = {
        "what": "memory",
        "steps": settings.memory_steps,
        "rss_mb": [list(pair) for pair in samples],
        "slope_mb_per_100_steps": 100 * slope,
        "largest_growth_mb": float((sizes - sizes[0]).max()),
        "split_conversations": sum(step.split for r in results for step in r.steps),
        "adapters_left": left.devices[0].resident_adapters + left.devices[0].paged_adapters,
        "parked_left": sum(t.parked for t in left.tenants.values()),
    }
    return [row], {"rss_growth_mb_per_100_steps": 100 * slope}


def _ratio(above: float, below: float) -> float:
    if below == 0:
        raise MarlaasError("--window: no step ended in it; take a longer one, or a longer --warmup")
    return above / below


def by_weight(amounts: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Each amount over what its weight entitles to, of all that there is: 1 when shares are as the weights."""
    unit = sum(amounts) / sum(weights)
    return [_ratio(amount, unit * weight) for amount, weight in zip(amounts, weights, strict=True)]


def jain(shares: Sequence[float]) -> float:
    """Jain's fairness index (Jain, Chiu, Hawe 1984): 1 when all are equal, 1/n when one has everything."""
    return _ratio(sum(shares) ** 2, len(shares) * sum(share**2 for share in shares))


Measurement = Callable[[Settings], Coroutine[Any, Any, Measured]]
MEASUREMENTS: dict[str, Measurement] = {
    "disturbances": measure_disturbances,
    "weights": measure_weights,
    "scheduling": measure_scheduling,
    "memory": measure_memory,
}
EXTENT: dict[str, tuple[Any, Any]] = {  # usual and quick
    "warmup": (5.0, 3.0),
    "window": (30.0, 12.0),
    "repeats": (3, 1),
    "memory_steps": (200, 100),
}
TABLES = {  # by how `what` begins: the title and the columns
    "others_under": (
        "the other seven beside a disturber, over the same beside an equal",
        "what repeat tokens steps fair_busy disturbed_busy disturber_device_share others_failures jain",
    ),
    "weights": ("tenants of weights 1, 2, 4, 1, ...", "what repeat jain jain_of_tokens shares_by_weight fair_busy"),
    "scheduling": ("the device thread's time for deciding, 32 tenants", "what repeat of_busy of_wall fair_busy"),
    "memory": (
        "resident memory, four tenants",
        "what steps slope_mb_per_100_steps largest_growth_mb split_conversations adapters_left parked_left",
    ),
}


def report(rows: Sequence[dict[str, Any]], ratios: dict[str, float]) -> None:
    """Prints the tables, the ratios beside their bars, and where the device was not the bottleneck."""
    for start, (title, columns) in TABLES.items():
        found = [row for row in rows if row["what"].startswith(start)]
        if found:
            table(found, columns.split(), title)
    against = [{"ratio": name, "median": value, **_bar(name, value)} for name, value in ratios.items()]
    table(against, ["ratio", "median", "bar", "holds"], "ratios")
    idle = sorted({row["what"] for row in rows if row.get("fair_busy", 1.0) < SATURATED})
    if idle:
        print(f"not saturated, busy for less than {SATURATED:.0%} of the window: {', '.join(idle)}")


def _bar(name: str, value: float) -> dict[str, str]:
    if name not in BARS:
        return {}
    sign, bar = BARS[name]
    holds = value >= bar if sign == ">=" else value < bar
    return {"bar": f"{sign} {bar:g}", "holds": "yes" if holds else "no"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(prog="python -m bench.isolation", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one run of each kind, shorter windows")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there")
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS))
    parser.add_argument("--model", default="tiny-random", help="what a fleet's model.source may be")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=1, help="of the device")
    parser.add_argument(
        "--places", type=float, default=1.0, metavar="SHARE", help="in the batch, of eight tenants' demand"
    )
    parser.add_argument("--warmup", type=float, metavar="SECONDS")
    parser.add_argument("--window", type=float, metavar="SECONDS")
    parser.add_argument("--repeats", type=int, help="runs of each kind")
    parser.add_argument("--memory-steps", type=int, help="of each of four tenants")
    options = parser.parse_args(arguments)
    chosen = {
        name: (quick if options.quick else usual) if getattr(options, name) is None else getattr(options, name)
        for name, (usual, quick) in EXTENT.items()
    }
    if chosen["memory_steps"] < 2 * SAMPLE_EVERY:
        parser.error(f"--memory-steps: {chosen['memory_steps']} must be at least {2 * SAMPLE_EVERY}")
    settings = Settings(
        ModelSpec(source=options.model, dtype=options.dtype), options.threads, places=options.places, **chosen
    )
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    try:
        for name in options.only:
            found, medians = asyncio.run(MEASUREMENTS[name](settings))
            rows += found
            ratios |= medians
    except MarlaasError as error:
        parser.error(str(error))
    report(rows, ratios)
    write_json(options.json, "isolation", rows, ratios, settings={**chosen, "places": options.places})


if __name__ == "__main__":
    main()
