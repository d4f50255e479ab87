"""What holds for every environment: a limit on calls in flight, and no nonsense in what it answers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from marlaas.environments.protocol import Environment, Example, Message, Outcome
from marlaas.errors import EnvironmentFailure

if TYPE_CHECKING:
    from marlaas.specs import EnvironmentSpec


class Limited:
    """An environment within its spec's concurrency, its messages and outcomes checked.

    `timeout_seconds` is kept where the work is done: see Host.call.
    """

    def __init__(self, environment: Environment, spec: EnvironmentSpec) -> None:
        self._environment = environment
        self._name = environment_name(spec)
        self._slots = asyncio.Semaphore(spec.concurrency)

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """What the policy may call."""
        return self._environment.tools

    async def reset(self, example: Example) -> list[Message]:
        """The messages the policy sees first: at least one."""
        async with self._slots:
            messages = await self._environment.reset(example)
        problem = messages_problem(messages) or ("no messages" if not messages else None)
        if problem:
            raise EnvironmentFailure(f"{self._name}: reset of example {example.id} answered {problem}")
        return messages

    async def step(self, example: Example, messages: Sequence[Message], completion: str) -> Outcome:
        """Judges a completion."""
        async with self._slots:
            outcome = await self._environment.step(example, messages, completion)
        problem = outcome_problem(outcome)
        if problem:
            raise EnvironmentFailure(f"{self._name}: step of example {example.id} answered {problem}")
        parts = {name: float(value) for name, value in outcome.parts.items()}
        return replace(outcome, parts=parts, reward=None if outcome.reward is None else float(outcome.reward))

    async def held_out(self, count: int, seed: int) -> list[Example]:
        """`count` examples for evaluation."""
        return await self._environment.held_out(count, seed)

    async def training(self, count: int, seed: int, cursor: int, exclude: frozenset[str]) -> tuple[list[Example], int]:
        """The next `count` training examples, and the next cursor."""
        return await self._environment.training(count, seed, cursor, exclude)

    async def close(self) -> None:
        """Frees what the environment holds."""
        await self._environment.close()


def environment_name(spec: EnvironmentSpec) -> str:
    """How failures name an environment."""
    if spec.kind == "reasoning_gym":
        return f"environment {spec.dataset}"
    if spec.kind == "tools":
        return f"{environment_name(spec.questions)} with tools"
    return f"environment {spec.path if spec.kind == 'dataset' else spec.entry}"


def outcome_problem(outcome: Outcome) -> str | None:
    """What is wrong with an outcome, or None."""
    if outcome.done and not _is_finite(outcome.reward):
        return f"the reward {outcome.reward!r}, which is not a finite number"
    if not outcome.done and outcome.reward is not None:
        return f"the reward {outcome.reward!r} without being done"
    if not outcome.done and not outcome.messages:
        return "neither done nor with a message to go on from"
    bad = [f"{name}={value!r}" for name, value in outcome.parts.items() if not _is_finite(value)]
    if bad:
        return f"parts with {bad[0]}, which is not a finite number"
    return messages_problem(outcome.messages)


def messages_problem(messages: Any) -> str | None:
    """What keeps an object from being a list of messages, or None."""
    if not isinstance(messages, list):
        return f"messages of type {type(messages).__name__} and not a list"
    for message in messages:
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            return f"the message {message!r:.80}, which must have exactly role and content"
        if not all(isinstance(value, str) for value in message.values()) or not message["role"]:
            return f"the message {message!r:.80}, whose role and content must be text"
    return None


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
