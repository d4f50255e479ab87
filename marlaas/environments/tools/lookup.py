"""A table of a file as a tool: a key in, its value out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marlaas.environments.files import file_problem, file_url, read_rows
from marlaas.environments.tools.parameters import Parameters, ToolError, function_schema
from marlaas.errors import EnvironmentFailure

if TYPE_CHECKING:
    from marlaas.specs import LookupToolSpec


class Lookup:
    """The tool. The table is read once, whole; a call is one look into a dict, where it is made."""

    def __init__(self, spec: LookupToolSpec, folder: Path) -> None:
        self.name = spec.name
        self._spec, self._folder = spec, folder
        self._parameters = Parameters({"key": str}, docs={"key": f"The {spec.key_column} to look up"})
        self._values: dict[str, str] = {}

    async def schema(self) -> dict[str, Any]:
        """One parameter: the key. Reads the table. Raises EnvironmentFailure."""
        self._values = await asyncio.to_thread(self._read)
        return function_schema(self.name, self._spec.description, self._parameters.schema)

    def _read(self) -> dict[str, str]:
        rows = read_rows(file_url(self._spec.path, self._folder), self._spec.key_column, self._spec.value_column)
        values: dict[str, str] = {}
        for number, row in rows:
            key = _normal(row["question"])
            if key in values:
                raise EnvironmentFailure(f"row {number}: the key {row['question']!r:.80} is there twice")
            values[key] = row["answer"]
        return values

    async def call(self, arguments: dict[str, Any]) -> str:
        """The key's value. Raises ToolError."""
        key = self._parameters.checked(arguments)["key"]
        value = self._values.get(_normal(key))
        if value is None:
            raise ToolError(f"there is no {key[:80]!r}; a key must be written in full, whatever its case")
        return value

    async def close(self) -> None:
        """Gives up the table."""
        self._values = {}


def _normal(key: str) -> str:
    return " ".join(key.casefold().split())


def check_lookup(spec: LookupToolSpec, folder: Path) -> str | None:
    """What is wrong with the file or its columns, or None. Reads the file's head only."""
    columns = {"key_column": spec.key_column, "value_column": spec.value_column}
    return file_problem(spec.path, file_url(spec.path, folder), columns)
