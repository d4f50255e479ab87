"""What the simulated tenants do: conversations, turns, tokens and tool times, all drawn from a seed."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from bench.workloads import Draw, Workload

TEMPLATE_TOKENS = 16
"""About what a chat template adds to a message."""

Count = Annotated[int, Field(ge=1)]


class WorkloadSpec(BaseModel):
    """One tenant's job; all tenants' are alike but for their draws.

    tokens: sampled in a turn. latency: seconds of a tool call, after each turn but the last. prompt_tokens: of a
    question, computed once for the group's conversations that start in one pass. answer_tokens: of a tool's answer.
    weights: of the tenants' shares, taken in turn.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: Count
    prompts: Count
    group: Count
    turns: Count = 1
    prompt_tokens: Count = 64
    tokens: Draw
    latency: Draw = Draw(0.0, 0.0, 0.0, 0.0)
    answer_tokens: int = Field(24, ge=1)
    max_staleness: int = Field(1, ge=0)
    weights: tuple[Annotated[float, Field(gt=0)], ...] = Field((1.0,), min_length=1)
    seed: int = Field(0, ge=0)

    @classmethod
    def of(cls, workload: Workload, seed: int = 0) -> WorkloadSpec:
        """A benchmark's workload, whose tokenizer takes a byte for a token."""
        return cls(
            steps=workload.steps,
            prompts=workload.prompts,
            group=workload.group,
            turns=workload.turns,
            prompt_tokens=workload.prompt_bytes + TEMPLATE_TOKENS,
            tokens=workload.tokens,
            latency=workload.latency,
            answer_tokens=workload.answer_bytes + TEMPLATE_TOKENS,
            seed=seed,
        )

    @field_validator("tokens", "latency")
    @classmethod
    def _draws(cls, draw: Draw) -> Draw:
        if draw.median < 0 or draw.sigma < 0 or not 0 <= draw.low <= draw.high:
            raise ValueError(f"{draw}: median and sigma must be at least 0, and 0 <= low <= high")
        return draw

    @field_validator("tokens")
    @classmethod
    def _a_turn_has_tokens(cls, draw: Draw) -> Draw:
        if draw.median == 0 or draw.low < 1:
            raise ValueError(f"{draw}: median must be above 0 and low at least 1, since a turn samples a token")
        return draw

    def weight(self, tenant: int) -> float:
        """Of the tenant's share."""
        return self.weights[tenant % len(self.weights)]

    def lengths(self, tenant: int) -> np.ndarray:
        """Tokens to sample, int64 `[steps, prompts, group, turns]`."""
        rng = np.random.default_rng([self.seed, tenant, 1])
        return np.rint(self.tokens.values(rng, self.steps, self.prompts, self.group, self.turns)).astype(np.int64)

    def waits(self, tenant: int) -> np.ndarray:
        """Seconds of tool calls, float64 `[steps, prompts, group, turns - 1]`."""
        rng = np.random.default_rng([self.seed, tenant, 2])
        return self.latency.values(rng, self.steps, self.prompts, self.group, self.turns - 1)
