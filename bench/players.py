"""The tenants of the isolation benchmark: equal ones, weighted ones, and those that disturb."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.environments import HangingGame, LetterGame, NanGame, RaisingGame, ToolGame, within_limits
from marlaas.environments import Environment
from marlaas.specs import LatencySpec, TenantSpec

PROMPTS, GROUP, STALENESS, TURNS = 4, 4, 1, 2
DEMAND = PROMPTS * GROUP * (STALENESS + 1)  # conversations of one tenant at once
WEIGHTED_PLACES = 14  # for each tenant of the weighted runs, of the 128 it asks for
FLOOD = 10  # times the prompts of a step
LETTERS = "abcdefghijklmnopqrstuvwxyz"  # so many that hardly a group is without a signal
TOOL = LatencySpec(median_seconds=0.05, sigma=0.6, min_seconds=0.02, max_seconds=0.15)
SLOW_TOOL = LatencySpec(median_seconds=30, sigma=0, min_seconds=30, max_seconds=30)
HANG_SECONDS = 3.0  # after which a call that hangs is given up


@dataclass(frozen=True)
class Player:
    """A tenant and the environment that it brings."""

    spec: TenantSpec
    environment: Environment


def tenant(name: str, seed: int = 0, timeout_seconds: float = 60, **fields: Any) -> TenantSpec:
    """A job whose learning rate is so small that its load stays as it is."""
    custom = {
        "kind": "custom",
        "entry": "bench.environments:LetterGame",
        "concurrency": 4096,
        "timeout_seconds": timeout_seconds,
    }
    return TenantSpec.model_validate(
        {
            "name": name,
            "environment": custom,
            "prompts_per_step": PROMPTS,
            "group_size": GROUP,
            "steps": 1_000_000,
            "max_staleness": STALENESS,
            "sampling": {"max_tokens": 16},
            "lora": {"rank": 8},
            "optimizer": {"learning_rate": 1e-6},
            "seed": seed,
            **fields,
        }
    )


def equal(index: int) -> Player:
    """One of the equal tenants: two turns and a quick tool between them."""
    spec = tenant(f"t{index}", index)
    return Player(spec, within_limits(ToolGame(LETTERS, TURNS, TOOL), spec.environment))


def slow() -> Player:
    """Its tool takes 30 s."""
    spec = tenant("slow")
    return Player(spec, within_limits(ToolGame(LETTERS, TURNS, SLOW_TOOL), spec.environment))


def flood() -> Player:
    """Ten times the prompts of a step."""
    spec = tenant("flood", prompts_per_step=FLOOD * PROMPTS)
    return Player(spec, within_limits(ToolGame(LETTERS, TURNS, TOOL), spec.environment))


def crash() -> Player:
    """Its environment raises at each judgement."""
    spec = tenant("crash")
    return Player(spec, within_limits(RaisingGame(LETTERS), spec.environment))


def nan() -> Player:
    """Its rewards are NaN, and reach the pool: nobody looks at them before."""
    return Player(tenant("nan"), NanGame(LETTERS))


def hang() -> Player:
    """Its tool never answers."""
    spec = tenant("hang", timeout_seconds=HANG_SECONDS)
    return Player(spec, within_limits(HangingGame(LETTERS), spec.environment))


def weighted(index: int, weight: float) -> Player:
    """Single long turns and many steps ahead, so that it always has more to sample than it gets places for."""
    share = {"weight": weight}
    spec = tenant(f"t{index}", index, quota=share, max_staleness=7, sampling={"max_tokens": 48})
    return Player(spec, within_limits(LetterGame(LETTERS), spec.environment))


DISTURBANCES: dict[str, Callable[[], Player]] = {
    "slow": slow,
    "flood": flood,
    "crash": crash,
    "nan": nan,
    "hang": hang,
}
