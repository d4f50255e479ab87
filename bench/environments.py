"""Environments inside the benchmark's process: games that any model can learn, and what a careless tenant may bring."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from marlaas.environments import Environment, Example, Message, Outcome
from marlaas.environments.limits import Limited
from marlaas.environments.tools.latency import wait_seconds
from marlaas.errors import EnvironmentFailure
from marlaas.specs import EnvironmentSpec, LatencySpec

T = TypeVar("T")


class LetterGame:
    """One turn: the reward is the share of the completion's characters that are among the target's."""

    def __init__(self, target: str) -> None:
        self._target = frozenset(target)
        self._question = f"write {target}"

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        return ()

    async def reset(self, example: Example) -> list[Message]:
        return [{"role": "user", "content": example.question}]

    async def step(self, example: Example, messages: Sequence[Message], completion: str) -> Outcome:
        return Outcome(True, self.reward(completion))

    async def held_out(self, count: int, seed: int) -> list[Example]:
        return [self._example(f"held-out-{seed}-{index}") for index in range(count)]

    async def training(self, count: int, seed: int, cursor: int, exclude: frozenset[str]) -> tuple[list[Example], int]:
        return [self._example(str(index)) for index in range(cursor, cursor + count)], cursor + count

    async def close(self) -> None:
        pass

    def reward(self, completion: str) -> float:
        """In [0, 1]; 0 for nothing."""
        return sum(character in self._target for character in completion) / max(1, len(completion))

    def _example(self, number: str) -> Example:
        return Example(number, f"{self._question} {number}")


class ToolGame(LetterGame):
    """The letter game after `turns` - 1 answers of a tool that takes its time; the last reply is scored.

    latency: of each answer, drawn by a hash of the conversation, so that the same one waits as long again.
    """

    def __init__(self, target: str, turns: int, latency: LatencySpec) -> None:
        super().__init__(target)
        self._turns, self._latency = turns, latency

    async def step(self, example: Example, messages: Sequence[Message], completion: str) -> Outcome:
        said: list[Message] = [*messages, {"role": "assistant", "content": completion}]
        if sum(message["role"] == "assistant" for message in said) == self._turns:
            return Outcome(True, self.reward(completion))
        await asyncio.sleep(wait_seconds(self._latency, example.id, said, 0))
        return Outcome(False, messages=[{"role": "user", "content": f"{self.reward(completion):.2f}"}])


class RaisingGame(LetterGame):
    """Every judgement raises."""

    async def step(self, example: Example, messages: Sequence[Message], completion: str) -> Outcome:
        raise ZeroDivisionError("the environment is broken")


class NanGame(LetterGame):
    """Every reward is NaN."""

    def reward(self, completion: str) -> float:
        return math.nan


class HangingGame(LetterGame):
    """Every judgement hangs for ever."""

    async def step(self, example: Example, messages: Sequence[Message], completion: str) -> Outcome:
        await asyncio.Event().wait()
        raise AssertionError


class Guarded:
    """What hosts do for users' code, for an environment in this process: a time limit, and failures with a reason."""

    def __init__(self, environment: Environment, timeout_seconds: float) -> None:
        self._environment, self._timeout = environment, timeout_seconds

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        return self._environment.tools

    async def reset(self, example: Example) -> list[Message]:
        return await self._call("reset", lambda: self._environment.reset(example))

    async def step(self, example: Example, messages: Sequence[Message], completion: str) -> Outcome:
        return await self._call("step", lambda: self._environment.step(example, messages, completion))

    async def held_out(self, count: int, seed: int) -> list[Example]:
        return await self._call("held_out", lambda: self._environment.held_out(count, seed))

    async def training(self, count: int, seed: int, cursor: int, exclude: frozenset[str]) -> tuple[list[Example], int]:
        return await self._call("training", lambda: self._environment.training(count, seed, cursor, exclude))

    async def close(self) -> None:
        await self._environment.close()

    async def _call(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self._timeout):
                return await call()
        except TimeoutError:
            raise EnvironmentFailure(f"{name} took more than {self._timeout:g} s") from None
        except Exception as error:  # a user's code may raise anything
            raise EnvironmentFailure(f"{name} raised {type(error).__name__}: {error}") from error


def within_limits(environment: Environment, spec: EnvironmentSpec) -> Environment:
    """The environment under its spec's limits, as the product keeps them for users' code."""
    return Limited(Guarded(environment, spec.timeout_seconds), spec)
