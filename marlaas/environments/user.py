"""What the host process of a user's class serves: the class behind one fixed set of methods."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from marlaas.environments.host import resolve
from marlaas.environments.streams import next_distinct
from marlaas.errors import EnvironmentFailure


class UserClass:
    """An instance of the user's class; see marlaas.environments.custom for what it may have."""

    def __init__(self, entry: str, arguments: dict[str, Any]) -> None:
        check(entry, arguments)
        self._user = resolve(entry)(**arguments)

    def examples(
        self, split: str, seed: int, start: int, count: int, exclude: list[str]
    ) -> tuple[list[tuple[int, dict[str, Any]]], int]:
        """The next `count` (index, example) from `start` on, and the index after them."""
        return next_distinct(lambda index: self._example(index, split, seed), start, count, exclude)

    def _example(self, index: int, split: str, seed: int) -> dict[str, Any]:
        item = self._user.example(index, split, seed)
        question = item.get("question") if isinstance(item, dict) else None
        if not isinstance(question, str) or not question.strip():
            raise EnvironmentFailure(f"example({index}, ...) gave {item!r:.80}, and must give a dict with a question")
        if not isinstance(item.get("answer"), str | None):
            raise EnvironmentFailure(
                f"example({index}, ...) gave the answer {item['answer']!r:.80}, and it must be text"
            )
        return dict(item)

    async def reset(self, example: dict[str, Any]) -> Any:
        """The class's messages; None if it leaves them to the prompt."""
        return await _run(self._user.reset, example) if hasattr(self._user, "reset") else None

    async def step(
        self, example: dict[str, Any], messages: list[dict[str, str]], completion: str, answer: str | None
    ) -> Any:
        """What `step` says to the completion, or `score` to the answer in it; a number becomes a finished outcome."""
        if hasattr(self._user, "step"):
            result = await _run(self._user.step, example, messages, completion)
            return {"reward": result, "extracted": answer} if isinstance(result, int | float) else result
        if answer is None:
            return {"reward": 0.0, "parts": {"answered": 0.0}}
        reward = await _run(self._user.score, example, answer)
        return {"reward": reward, "parts": {"answered": 1.0}, "extracted": answer}


async def _run(method: Any, *arguments: Any) -> Any:
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    return await asyncio.get_running_loop().run_in_executor(None, method, *arguments)


def check(entry: str, arguments: dict[str, Any]) -> None:
    """Raises EnvironmentFailure, as `field: problem`, when the class cannot serve or be built from the arguments."""
    try:
        cls = resolve(entry)
    except EnvironmentFailure as error:
        raise EnvironmentFailure(f"entry: {error}") from error
    if not inspect.isclass(cls):
        raise EnvironmentFailure(f"entry: {entry!r} is a {type(cls).__name__} and not a class")
    example = getattr(cls, "example", None)
    if not inspect.isfunction(example) or inspect.iscoroutinefunction(example):
        raise EnvironmentFailure(f"entry: {entry!r} must have a plain method example(self, index, split, seed)")
    if hasattr(cls, "step") == hasattr(cls, "score"):
        raise EnvironmentFailure(
            f"entry: {entry!r} must have either step(self, example, messages, completion) "
            "or score(self, example, answer)"
        )
    signature = inspect.signature(cls)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise EnvironmentFailure(
            f"arguments: {error}; allowed are {', '.join(signature.parameters) or 'none'}"
        ) from None
