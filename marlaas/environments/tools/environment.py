"""Questions answered with the help of tools: the calls of each reply are run and answered until one makes none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from marlaas.environments.limits import environment_name
from marlaas.environments.protocol import Environment, Example, Message, Outcome
from marlaas.environments.tools.calculator import Calculator
from marlaas.environments.tools.function import Function, check_function
from marlaas.environments.tools.latency import wait_seconds
from marlaas.environments.tools.lookup import Lookup, check_lookup
from marlaas.environments.tools.parameters import MAX_ERROR, MAX_TEXT, ToolError
from marlaas.environments.tools.parsing import Call, parse_calls
from marlaas.errors import EnvironmentFailure

if TYPE_CHECKING:
    from marlaas.specs import ToolSpec, ToolsSpec

_ERROR = "Error: "  # how a tool's message begins that says why there is no result


class Tool(Protocol):
    """Something the model can call by a name."""

    name: str

    async def schema(self) -> dict[str, Any]:
        """What the model is told of it. Called once, before any call. Raises EnvironmentFailure."""

    async def call(self, arguments: dict[str, Any]) -> str:
        """The answer to arguments that may be anything. Raises ToolError and nothing else."""

    async def close(self) -> None:
        """Frees what it holds."""


class ToolsEnvironment:
    """Another environment's questions, prompt and scoring, and tools between the question and the answer.

    Whatever the model writes is answered: what is wrong with a call is told to the model and counted, never raised.
    """

    def __init__(self, spec: ToolsSpec, questions: Environment, folder: Path) -> None:
        self._spec, self._questions = spec, questions
        self._name = environment_name(spec)
        self._tools = {tool.name: tool for tool in (_tool(each, spec, folder) for each in spec.tools)}
        self._schemas: list[dict[str, Any]] | None = None
        self._preparing = asyncio.Lock()

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """The tools' schemas. Raises EnvironmentFailure before the first example or reset."""
        if self._schemas is None:
            raise EnvironmentFailure(f"{self._name}: the tools are known after the first reset")
        return self._schemas

    async def reset(self, example: Example) -> list[Message]:
        """The question, as the inner spec's prompt sets it."""
        await self._prepare()
        return await self._questions.reset(example)

    async def step(self, example: Example, messages: Sequence[Message], completion: str) -> Outcome:
        """What the tools answer to the calls in the completion; without any, or at the last turn, the inner outcome.

        Its parts gain `turns`, `tool_calls` and `tool_errors`: replies, tools' answers, and answers that are errors.
        """
        await self._prepare()
        turns = 1 + _replies(messages) - _replies(await self._questions.reset(example))
        parsed = parse_calls(completion, self._spec.format)
        if turns < self._spec.max_turns and (parsed.calls or parsed.errors):
            said: list[Message] = [*messages, {"role": "assistant", "content": completion}]
            waits = [self._wait(example, said, number) for number in range(len(parsed.calls))]
            answers = await asyncio.gather(*map(self._answer, parsed.calls, waits))
            texts = [*answers, *(_ERROR + error for error in parsed.errors)]
            return Outcome(False, messages=[{"role": "tool", "content": _sendable(text)} for text in texts])
        outcome = await self._questions.step(example, messages, completion)
        answered = [message["content"] for message in messages if message["role"] == "tool"]
        errors = sum(text.startswith(_ERROR) for text in answered)
        parts = {"turns": float(turns), "tool_calls": float(len(answered)), "tool_errors": float(errors)}
        return replace(outcome, parts={**outcome.parts, **parts})

    def _wait(self, example: Example, said: list[Message], number: int) -> float:
        return wait_seconds(self._spec.latency, example.id, said, number) if self._spec.latency else 0.0

    async def _answer(self, call: Call, wait: float) -> str:
        if wait:
            await asyncio.sleep(wait)
        tool = self._tools.get(call.name)
        if tool is None:
            return f"{_ERROR}there is no tool {call.name[:80]!r}; there are {', '.join(self._tools)}"
        try:
            return await tool.call(call.arguments)
        except ToolError as error:
            return f"{_ERROR}{str(error)[:MAX_ERROR]}"

    async def _prepare(self) -> None:
        """Reads tables and imports functions, once."""
        async with self._preparing:
            if self._schemas is None:
                self._schemas = await asyncio.gather(*map(self._schema, self._tools.values()))

    async def _schema(self, tool: Tool) -> dict[str, Any]:
        try:
            return await tool.schema()
        except EnvironmentFailure as error:
            raise EnvironmentFailure(f"{self._name}: tool {tool.name}: {error}") from None

    async def held_out(self, count: int, seed: int) -> list[Example]:
        """The inner environment's."""
        await self._prepare()
        return await self._questions.held_out(count, seed)

    async def training(self, count: int, seed: int, cursor: int, exclude: frozenset[str]) -> tuple[list[Example], int]:
        """The inner environment's."""
        await self._prepare()
        return await self._questions.training(count, seed, cursor, exclude)

    async def close(self) -> None:
        """Closes the tools and the inner environment."""
        for tool in self._tools.values():
            await tool.close()
        await self._questions.close()


def _replies(messages: Sequence[Message]) -> int:
    """The prompt's own examples are replies too, so these count only against those of a reset."""
    return sum(message["role"] == "assistant" for message in messages)


def _sendable(text: str) -> str:
    """Short enough, and without the half characters that JSON can hold and tokenizers cannot."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... (cut off)"


def _tool(spec: ToolSpec, tools: ToolsSpec, folder: Path) -> Tool:
    if spec.kind == "calculator":
        return Calculator()
    if spec.kind == "lookup":
        return Lookup(spec, folder)
    return Function(spec, tools, folder)


def check_tools(spec: ToolsSpec, folder: Path) -> str | None:
    """What keeps the tools from being opened, or None. Imports functions in processes of their own."""
    for at, tool in enumerate(spec.tools):
        problem = None
        if tool.kind == "lookup":
            problem = check_lookup(tool, folder)
        elif tool.kind == "function":
            problem = check_function(tool, spec, folder)
        if problem:
            return f"tools[{at}].{problem}"
    return None
