"""The fleets' workloads: how many conversations, turns and tokens, and how long tools take. All drawn from seeds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Draw:
    """A log-normal, clipped: many values about the median, a few far above. median 0: always 0."""

    median: float
    sigma: float
    low: float
    high: float

    def values(self, rng: np.random.Generator, *shape: int) -> np.ndarray:
        """float64 of that shape."""
        if self.median == 0:
            return np.zeros(shape)
        return np.clip(self.median * np.exp(self.sigma * rng.standard_normal(shape)), self.low, self.high)


@dataclass(frozen=True)
class Workload:
    """What each tenant does. tokens: sampled in a turn; latency: seconds of a tool call, after each turn but the last.

    prompt_bytes and answer_bytes: of the question, and of a tool's answer; the bench's tokenizer takes one a token.
    """

    name: str
    steps: int
    prompts: int
    group: int
    turns: int
    tokens: Draw
    latency: Draw
    prompt_bytes: int = 48
    answer_bytes: int = 12

    @property
    def conversations(self) -> int:
        return self.prompts * self.group

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation, with what the chat template adds."""
        return 64 + self.prompt_bytes + self.turns * (int(self.tokens.high) + self.answer_bytes + 48)

    def lengths(self, seed: int) -> np.ndarray:
        """Tokens to sample, int64 `[steps * prompts, group, turns]`."""
        rng = np.random.default_rng([seed, 1])
        return np.rint(self.tokens.values(rng, self.steps * self.prompts, self.group, self.turns)).astype(np.int64)

    def waits(self, seed: int) -> np.ndarray:
        """Seconds of tool calls, `[steps * prompts, group, turns]`; the last turn has none."""
        waits = self.latency.values(np.random.default_rng([seed, 2]), self.steps * self.prompts, self.group, self.turns)
        waits[..., -1] = 0.0
        return waits

    def document(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


_NO_TOOL = Draw(0.0, 0.0, 0.0, 0.0)
TOOL = Workload("tool", 4, 2, 4, 5, Draw(8, 0.0, 8, 8), Draw(1.0, 0.6, 0.5, 3.0), answer_bytes=8)
MATH = Workload("math", 3, 4, 8, 1, Draw(24, 0.8, 4, 128), _NO_TOOL)
WORKLOADS = {w.name: w for w in (TOOL, MATH)}


def with_steps(workload: Workload, steps: int) -> Workload:
    """The workload, shorter or longer."""
    return replace(workload, steps=steps)
