"""Any data set of reasoning-gym, with its own scorer, in a process that all such environments share."""

from __future__ import annotations

import difflib
import hashlib
import json
import random
import threading
from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from marlaas.environments.answers import Extractor
from marlaas.environments.hosting import Served, SharedHost
from marlaas.environments.limits import environment_name
from marlaas.environments.prompts import prompt_messages
from marlaas.environments.protocol import Example, Message, Outcome
from marlaas.environments.streams import next_distinct

if TYPE_CHECKING:
    from marlaas.specs import ReasoningGymSpec

# reasoning-gym seeds item i with seed + i and takes seeds below 2^32: the streams' first seeds lie in the lower
# half of each half, so that held-out and training items have different seeds for 2^30 examples.
_SEEDS_A_STREAM = 2**30
_HELD_OUT_SEEDS = 2**31
_BLOCK = 500  # items of one data set object; some make all items of one when they are built
_EXAMPLES_SECONDS = 300.0
_making = threading.Lock()


class GymEnvironment:
    """Single-turn questions of a reasoning-gym data set."""

    tools: Sequence[dict[str, Any]] = ()

    def __init__(self, spec: ReasoningGymSpec) -> None:
        self._spec = spec
        self._name = environment_name(spec)
        self._settings = json.dumps(spec.settings, sort_keys=True)
        self._extractor = Extractor(spec.answer, self._name, spec.timeout_seconds)
        self._host = SharedHost(Served("marlaas.environments.reasoning_gym:GymWorker", memory_mb=8192))

    async def reset(self, example: Example) -> list[Message]:
        """The question, as the spec's prompt sets it."""
        return prompt_messages(self._spec.prompt, example.question)

    async def step(self, example: Example, messages: Sequence[Message], completion: str) -> Outcome:
        """Done, with the data set's own score of the extracted answer."""
        answer = await self._extractor.extract(completion, example)
        if answer is None:
            return Outcome(True, 0.0, {"answered": 0.0})
        item = (self._spec.dataset, self._settings, example.data["seed"], example.data["index"])
        what = f"{self._name}: step of example {example.id}"
        reward = await self._host.call("score", *item, answer, seconds=self._spec.timeout_seconds, what=what)
        return Outcome(True, reward, {"answered": 1.0}, extracted=answer)

    async def held_out(self, count: int, seed: int) -> list[Example]:
        """The first `count` distinct questions of the held-out stream."""
        first_seed = _HELD_OUT_SEEDS + _first_seed("held out", seed)
        return (await self._examples("held-out", first_seed, 0, count, frozenset()))[0]

    async def training(self, count: int, seed: int, cursor: int, exclude: frozenset[str]) -> tuple[list[Example], int]:
        """The next questions of the training stream; `cursor` is an index into it."""
        return await self._examples("training", _first_seed("training", seed), cursor, count, exclude)

    async def _examples(
        self, split: str, seed: int, start: int, count: int, exclude: frozenset[str]
    ) -> tuple[list[Example], int]:
        stream = (self._spec.dataset, self._settings, seed, start, count, sorted(exclude))
        what = f"{self._name}: the search for {split} examples"
        found, cursor = await self._host.call("examples", *stream, seconds=_EXAMPLES_SECONDS, what=what)
        examples = [
            Example(f"{split}-{index}", question, answer, {"seed": seed, "index": index})
            for index, question, answer in found
        ]
        return examples, cursor

    async def close(self) -> None:
        """Gives up the shared processes."""
        await self._extractor.close()
        await self._host.close()


class GymWorker:
    """What the host process serves. It keeps data sets and items that are in use, and nothing else."""

    def examples(
        self, dataset: str, settings: str, seed: int, start: int, count: int, exclude: list[str]
    ) -> tuple[list[tuple[int, str, str | None]], int]:
        """The next `count` (index, question, answer) from `start` on, and the index after them."""
        found, cursor = next_distinct(lambda i: _item(dataset, settings, seed, i), start, count, exclude)
        return [(i, item["question"], _text(item["answer"])) for i, item in found], cursor

    def score(self, dataset: str, settings: str, seed: int, index: int, answer: str) -> float:
        """The data set's score of an answer to an item."""
        scorer = _dataset(dataset, settings, seed + index // _BLOCK * _BLOCK)
        return float(scorer.score_answer(answer, _item(dataset, settings, seed, index)))


def _text(answer: Any) -> str | None:
    return answer if answer is None or isinstance(answer, str) else str(answer)


def _first_seed(stream: str, seed: int) -> int:
    """Where a stream starts, below 2^30; streams of different seeds start far apart."""
    digest = hashlib.blake2b(f"{stream} {seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _SEEDS_A_STREAM


@lru_cache(maxsize=256)
def _dataset(name: str, settings: str, seed: int) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=seed, size=_BLOCK, **json.loads(settings))


@lru_cache(maxsize=8192)
def _item(name: str, settings: str, seed: int, index: int) -> dict[str, Any]:
    block = _dataset(name, settings, seed + index // _BLOCK * _BLOCK)
    with _making:
        # A few data sets draw from the module's generator beside their own.
        random.seed(seed + index)
        item: dict[str, Any] = block[index % _BLOCK]
    return item


def check_gym(spec: ReasoningGymSpec) -> str | None:
    """What is wrong with the data set's name or its settings, or None. Imports reasoning_gym."""
    from reasoning_gym.factory import DATASETS

    if spec.dataset not in DATASETS:
        near = difflib.get_close_matches(spec.dataset, DATASETS, n=3, cutoff=0.4)
        known = f"nearest are {', '.join(near)}" if near else f"there are {', '.join(sorted(DATASETS))}"
        return f"dataset: {spec.dataset!r} is not a reasoning-gym data set; {known}"
    config = DATASETS[spec.dataset][1]
    allowed = sorted(f.name for f in fields(config) if f.init and f.name not in ("size", "seed"))
    for name in spec.settings:
        if name not in allowed:
            return f"settings.{name}: unknown setting of {spec.dataset}; allowed are {', '.join(allowed)}"
    return _settings_problem(config, spec.settings)


def _settings_problem(config: Any, settings: dict[str, Any]) -> str | None:
    try:
        made = config(**settings, size=_BLOCK, seed=0)
        if hasattr(made, "validate"):
            made.validate()
    except Exception as error:  # each data set checks its settings in its own way: assert, ValueError, TypeError
        return f"settings: {settings} is not allowed: {error or type(error).__name__}"
    return None
