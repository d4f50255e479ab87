"""Questions and answers from a JSONL or Parquet file, on disk or in an object store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marlaas.environments.answers import Extractor
from marlaas.environments.files import Rows, file_problem, file_url, read_rows
from marlaas.environments.hosting import Served, SharedHost
from marlaas.environments.limits import environment_name
from marlaas.environments.prompts import prompt_messages
from marlaas.environments.protocol import Example, Message, Outcome
from marlaas.environments.scoring import exact_score, numeric_score, parse_number
from marlaas.environments.streams import next_distinct
from marlaas.errors import EnvironmentFailure

if TYPE_CHECKING:
    from marlaas.specs import DatasetSpec


class DatasetEnvironment:
    """Single-turn questions of a file. A row is held out when the hash of its question says so, whatever the seed."""

    tools: Sequence[dict[str, Any]] = ()

    def __init__(self, spec: DatasetSpec, folder: Path) -> None:
        self._spec, self._folder = spec, folder
        self._name = environment_name(spec)
        self._extractor = Extractor(spec.answer, self._name, spec.timeout_seconds)
        self._host = SharedHost(Served("marlaas.environments.scoring:MathWorker"))
        self._loading = asyncio.Lock()
        self._rows: Rows | None = None

    async def reset(self, example: Example) -> list[Message]:
        """The question, as the spec's prompt sets it."""
        return prompt_messages(self._spec.prompt, example.question)

    async def step(self, example: Example, messages: Sequence[Message], completion: str) -> Outcome:
        """Done, with reward 1 when the extracted answer is right by the spec's scoring, else 0."""
        answer = await self._extractor.extract(completion, example)
        if answer is None:
            return Outcome(True, 0.0, {"answered": 0.0})
        return Outcome(True, await self._score(answer, example), {"answered": 1.0}, extracted=answer)

    async def _score(self, answer: str, example: Example) -> float:
        expected = example.answer
        assert expected is not None, "every row has an answer"
        if self._spec.scoring == "exact":
            return exact_score(answer, expected)
        if self._spec.scoring == "numeric":
            return numeric_score(answer, expected)
        what, seconds = f"{self._name}: step of example {example.id}", self._spec.timeout_seconds
        return float(await self._host.call("score", answer, expected, seconds=seconds, what=what))

    async def held_out(self, count: int, seed: int) -> list[Example]:
        """`count` held-out rows with distinct questions, in an order that the seed gives."""
        rows = await self._load()
        return self._examples(rows, "held-out", seed, 0, count, frozenset())[0]

    async def training(self, count: int, seed: int, cursor: int, exclude: frozenset[str]) -> tuple[list[Example], int]:
        """The next training rows; each epoch has an order of its own. cursor: rows drawn so far."""
        rows = await self._load()
        return self._examples(rows, "training", seed, cursor, count, exclude)

    def _examples(
        self, rows: Rows, split: str, seed: int, start: int, count: int, exclude: frozenset[str]
    ) -> tuple[list[Example], int]:
        draw = rows.held_out if split == "held-out" else rows.training
        try:
            found, cursor = next_distinct(lambda index: draw(seed, index), start, count, exclude)
        except EnvironmentFailure as error:
            share = f"{rows.counts} (held_out_share {self._spec.held_out_share:g})"
            what = f"the search for {split} examples"
            raise EnvironmentFailure(f"{self._name}: {what} failed: {error}; {share}") from None
        return [Example(f"{split}-{index}", row["question"], row["answer"]) for index, row in found], cursor

    async def _load(self) -> Rows:
        async with self._loading:
            if self._rows is None:
                self._rows = await asyncio.to_thread(self._read)
            return self._rows

    def _read(self) -> Rows:
        spec = self._spec
        try:
            rows = read_rows(file_url(spec.path, self._folder), spec.question_column, spec.answer_column)
        except EnvironmentFailure as error:
            raise EnvironmentFailure(f"{self._name}: {error}") from None
        for number, row in rows:
            if spec.scoring == "numeric" and parse_number(row["answer"]) is None:
                raise EnvironmentFailure(f"{self._name}: row {number}: the answer {row['answer']!r:.80} is no number")
        return Rows([row for _, row in rows], spec.held_out_share)

    async def close(self) -> None:
        """Gives up the shared processes and the rows."""
        await self._extractor.close()
        await self._host.close()
        self._rows = None


def check_dataset(spec: DatasetSpec, folder: Path) -> str | None:
    """What is wrong with the file or its columns, or None. Reads the file's head only."""
    columns = {"question_column": spec.question_column, "answer_column": spec.answer_column}
    return file_problem(spec.path, file_url(spec.path, folder), columns)
