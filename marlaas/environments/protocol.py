"""What an environment is to the rest of the system: examples in, messages and rewards out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, str]
"""A chat message as chat templates take it: `role` and `content`."""


@dataclass(frozen=True)
class Example:
    """One question. `data` is the environment's own and can be written as JSON."""

    id: str
    question: str
    answer: str | None = None
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What the environment says to a completion: the end with a finite reward, or messages to go on from.

    parts: named numbers behind the reward, for the record. extracted: the answer found in the completion.
    """

    done: bool
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    extracted: str | None = None


class Environment(Protocol):
    """Single- or multi-turn. All state is in the example and the messages, so calls may run at once or again.

    Every method raises EnvironmentFailure, which names the environment, the call and the reason.
    """

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """JSON schemas of what the policy may call, `{"type": "function", "function": {...}}` each; mostly none.

        Known once any of the calls below has returned; EnvironmentFailure before that.
        """

    async def reset(self, example: Example) -> list[Message]:
        """The messages the policy sees first."""

    async def step(self, example: Example, messages: Sequence[Message], completion: str) -> Outcome:
        """Judges a completion. messages: the chat before it."""

    async def held_out(self, count: int, seed: int) -> list[Example]:
        """`count` examples for evaluation with pairwise distinct questions, the same for the same seed."""

    async def training(self, count: int, seed: int, cursor: int, exclude: frozenset[str]) -> tuple[list[Example], int]:
        """The next `count` training examples of a deterministic stream, and the next cursor.

        Their questions are distinct within the call. cursor: 0 at first, then what the last call returned.
        exclude: question keys that are skipped.
        """

    async def close(self) -> None:
        """Frees what the environment holds; it is not called again."""


def question_key(example: Example) -> str:
    """What identifies a question: 32 hex digits of its text, whatever its case and spacing."""
    return text_key(example.question)


def text_key(question: str) -> str:
    """`question_key` of the bare text."""
    return hashlib.blake2b(" ".join(question.casefold().split()).encode(), digest_size=16).hexdigest()
