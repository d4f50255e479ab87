"""Files of questions and answers: reading them, checking their columns, and splitting off what is held out."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import fsspec

from marlaas.environments.protocol import text_key
from marlaas.errors import EnvironmentFailure

SUFFIXES = (".jsonl", ".parquet")

Row = dict[str, str]
"""`question` and `answer`, neither of them blank."""


class Rows:
    """Rows in two parts by the hash of the question, so that a row's part changes with no seed and no other row."""

    def __init__(self, rows: list[Row], held_out_share: float) -> None:
        bound = int(held_out_share * 2**128)
        is_held_out = [int(text_key(row["question"]), 16) < bound for row in rows]
        self._held_out = [row for row, out in zip(rows, is_held_out, strict=True) if out]
        self._training = [row for row, out in zip(rows, is_held_out, strict=True) if not out]
        self._order = lru_cache(maxsize=4)(_order)
        self.counts = f"of {len(rows)} rows {len(self._held_out)} are held out"

    def held_out(self, seed: int, index: int) -> Row:
        """The index-th held-out row in the seed's order. IndexError after the last."""
        return self._held_out[self._order(len(self._held_out), f"held out {seed}")[index]]

    def training(self, seed: int, index: int) -> Row:
        """The index-th training row of an endless stream of epochs. IndexError when there are none."""
        if not self._training:
            raise IndexError(index)
        epoch, at = divmod(index, len(self._training))
        return self._training[self._order(len(self._training), f"training {seed} {epoch}")[at]]


def _order(count: int, seed: str) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def file_url(path: str, folder: Path) -> str:
    """The URL fsspec opens for a spec's path."""
    return path if "://" in path else str(folder / Path(path).expanduser())


def file_problem(path: str, url: str, columns: dict[str, str]) -> str | None:
    """What is wrong with a file, as `field: problem`, or None. columns: field to the column it names."""
    if not url.endswith(SUFFIXES):
        return f"path: {path!r} must end in {' or '.join(SUFFIXES)}"
    try:
        with fsspec.open(url, "rb") as file:
            found = _columns(url, file)
    except FileNotFoundError:
        return f"path: {path!r}: no such file"
    except (OSError, ValueError, ImportError) as error:
        return f"path: {path!r} cannot be read: {error}"
    for field, column in columns.items():
        if column not in found:
            return f"{field}: {column!r} is not a column; columns are {', '.join(found)}"
    return None


def _columns(url: str, file: IO[bytes]) -> list[str]:
    if url.endswith(".parquet"):
        import pyarrow.parquet as pq

        return list(pq.read_schema(file).names)
    for line in file:
        if line.strip():
            return list(_object(line, 1))
    raise ValueError("it is empty")


def read_rows(url: str, question_column: str, answer_column: str) -> list[tuple[int, Row]]:
    """All rows with their numbers: in JSONL of the line, in Parquet of the row, from 1.

    Numbers become text. Raises EnvironmentFailure that names the row when a value is missing, blank or neither text
    nor a number.
    """
    try:
        with fsspec.open(url, "rb") as file:
            records = list(
                _parquet(file, [question_column, answer_column]) if url.endswith(".parquet") else _jsonl(file)
            )
    except (OSError, ValueError, ImportError) as error:
        raise EnvironmentFailure(f"cannot be read: {error}") from None
    return [
        (number, {"question": _text(record, question_column, number), "answer": _text(record, answer_column, number)})
        for number, record in records
    ]


def _jsonl(file: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(file, 1):
        if line.strip():
            yield number, _object(line, number)


def _object(line: bytes, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"row {number} is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"row {number} is not a JSON object")
    return record


def _parquet(file: IO[bytes], columns: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow.parquet as pq

    yield from enumerate(pq.read_table(file, columns=sorted(set(columns))).to_pylist(), 1)


def _text(record: dict[str, Any], column: str, number: int) -> str:
    value = record.get(column)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise EnvironmentFailure(f"row {number}: {column} is {value!r:.80}, and must be text or a number")
    if not value.strip():
        raise EnvironmentFailure(f"row {number}: {column} is blank")
    return value
