"""A user's class as an environment, in a process of its own.

The class, named `module:Class`, has a plain method that makes examples, and one that judges. The smallest:

    class Reverse:
        def __init__(self, length: int = 3) -> None:          # the spec's `arguments`, by name
            self.length = length

        def example(self, index: int, split: str, seed: int) -> dict:
            # split: "training" or "held-out". The same for the same arguments; IndexError: there are no more.
            word = "".join(random.Random(f"{split} {seed} {index}").choices("abcdef", k=self.length))
            return {"question": f"Spell {word} backward.", "answer": word[::-1]}

        def score(self, example: dict, answer: str) -> float:  # answer: extracted as the spec's `answer` says
            return float(answer == example["answer"])

`example` gives a dict of JSON with `question`, perhaps `answer`, and whatever the class wants back. For several
turns, or to see the whole completion, have `step` in place of `score`:

    def step(self, example: dict, messages: list[dict], completion: str) -> dict | float:
        # messages: the chat before the completion. A number ends the conversation with that reward.
        return {"done": False, "messages": [{"role": "user", "content": "Too high."}]}
        return {"reward": 1.0, "parts": {"turns": 3.0}, "extracted": "42"}

`reset(self, example) -> list[dict]` is optional and replaces the spec's prompt. `reset`, `step` and `score` may be
`async def`; if not, they run in up to `concurrency` threads. A call may be made again when the process had to be
restarted, so they must keep no state between calls. Prints do no harm.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marlaas.environments.answers import Extractor
from marlaas.environments.hosting import Host, Served, start_problem
from marlaas.environments.limits import environment_name
from marlaas.environments.prompts import prompt_messages
from marlaas.environments.protocol import Example, Message, Outcome
from marlaas.errors import EnvironmentFailure

if TYPE_CHECKING:
    from marlaas.specs import CustomSpec

_EXAMPLES_SECONDS = 300.0
_KEYS = {"reward", "done", "messages", "parts", "extracted"}


class CustomEnvironment:
    """The near side of a user's class."""

    tools: Sequence[dict[str, Any]] = ()

    def __init__(self, spec: CustomSpec, folder: Path) -> None:
        self._spec = spec
        self._name = environment_name(spec)
        self._extractor = Extractor(spec.answer, self._name, spec.timeout_seconds)
        self._host = Host(_served(spec, folder, "marlaas.environments.user:UserClass"))

    async def reset(self, example: Example) -> list[Message]:
        """The class's own messages, or the question as the spec's prompt sets it."""
        messages = await self._call("reset", example, example.data)
        return prompt_messages(self._spec.prompt, example.question) if messages is None else messages

    async def step(self, example: Example, messages: Sequence[Message], completion: str) -> Outcome:
        """What the class says to a completion, or to the answer in it."""
        answer = await self._extractor.extract(completion, example)
        result = await self._call("step", example, example.data, list(messages), completion, answer)
        if isinstance(result, dict) and set(result) <= _KEYS:
            parts, more, extracted = result.get("parts") or {}, result.get("messages") or [], result.get("extracted")
            if isinstance(parts, dict) and isinstance(extracted, str | None):
                return Outcome(result.get("done", True) is not False, result.get("reward"), parts, more, extracted)
        raise EnvironmentFailure(
            f"{self._name}: step of example {example.id} answered {result!r:.80}, and must answer a number or a dict "
            "of reward, done, messages, parts and extracted"
        )

    async def held_out(self, count: int, seed: int) -> list[Example]:
        """The first `count` distinct examples of the class's split "held-out"."""
        return (await self._examples("held-out", seed, 0, count, frozenset()))[0]

    async def training(self, count: int, seed: int, cursor: int, exclude: frozenset[str]) -> tuple[list[Example], int]:
        """The next examples of the class's split "training"; cursor: the class's next index."""
        return await self._examples("training", seed, cursor, count, exclude)

    async def _examples(
        self, split: str, seed: int, start: int, count: int, exclude: frozenset[str]
    ) -> tuple[list[Example], int]:
        stream, what = (split, seed, start, count, sorted(exclude)), f"{self._name}: the search for {split} examples"
        seconds = max(_EXAMPLES_SECONDS, self._spec.timeout_seconds)
        found, cursor = await self._host.call("examples", *stream, seconds=seconds, what=what)
        return [Example(f"{split}-{i}", item["question"], item.get("answer"), item) for i, item in found], cursor

    async def _call(self, method: str, example: Example, *arguments: Any) -> Any:
        what = f"{self._name}: {method} of example {example.id}"
        return await self._host.call(method, *arguments, seconds=self._spec.timeout_seconds, what=what)

    async def close(self) -> None:
        """Ends the process."""
        await self._extractor.close()
        await self._host.close()


def _served(spec: CustomSpec, folder: Path, entry: str) -> Served:
    return Served(
        entry=entry,
        arguments={"entry": spec.entry, "arguments": spec.arguments},
        path=str((folder / (spec.path or "")).expanduser().resolve()),
        memory_mb=spec.memory_mb,
        concurrency=spec.concurrency,
    )


def check_custom(spec: CustomSpec, folder: Path) -> str | None:
    """What keeps the class from being used, or None. Imports it, in a process of its own, and does not build it."""
    served = _served(spec, folder, "marlaas.environments.user:check")
    if not Path(served.path or "").is_dir():
        return f"path: {str(spec.path)!r} is not a folder"
    try:
        json.dumps(spec.arguments)
    except TypeError as error:
        return f"arguments: {error}"
    return start_problem(served, spec.entry)
