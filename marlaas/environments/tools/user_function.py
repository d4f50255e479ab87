"""What the host process of a user's function serves: the function, and what its signature says of it."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import typing
from collections.abc import Callable
from typing import Any

from marlaas.environments.host import describe, resolve
from marlaas.environments.tools.parameters import MAX_TEXT, Parameters, ToolError, function_schema
from marlaas.errors import EnvironmentFailure

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):\s*$")
_DOCUMENTED = re.compile(r"^(?::param\s+)?(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class UserFunction:
    """A function that is a tool: every parameter is annotated, and the docstring says what it does."""

    def __init__(self, entry: str) -> None:
        self._function, self._parameters, self._schema = _understood(entry)

    def schema(self) -> dict[str, Any]:
        """What the model is told of it."""
        return self._schema

    async def call(self, arguments: dict[str, Any]) -> dict[str, str]:
        """`{"text": ...}`, what the function returned, or `{"error": ...}`, why it was not called."""
        try:
            checked = self._parameters.checked(arguments)
        except ToolError as error:
            return {"error": str(error)}
        if inspect.iscoroutinefunction(self._function):
            result = await self._function(**checked)
        else:
            result = await asyncio.get_running_loop().run_in_executor(None, lambda: self._function(**checked))
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        return {"text": text[:MAX_TEXT]}


def _understood(entry: str) -> tuple[Callable[..., Any], Parameters, dict[str, Any]]:
    """The function, its parameters and its schema. Raises EnvironmentFailure with the reason it cannot be a tool."""
    function = resolve(entry)
    if not inspect.isfunction(function):
        raise EnvironmentFailure(f"{entry!r} is a {type(function).__name__} and not a function")
    description, docs = _docstring(inspect.getdoc(function) or "")
    if not description:
        raise EnvironmentFailure(f"{entry!r} has no docstring, and its first part is what the model is told")
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        if parameter.kind not in _KINDS:
            raise EnvironmentFailure(f"{entry!r}: the parameter {parameter} must be one that can be given by name")
        if parameter.annotation is inspect.Parameter.empty:
            raise EnvironmentFailure(f"{entry!r}: the parameter {name} must have an annotation, such as {name}: str")
    optional = frozenset(n for n, p in parameters.items() if p.default is not inspect.Parameter.empty)
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        takes = Parameters({name: hints[name] for name in parameters}, optional, docs)
    except Exception as error:  # annotations are code of the user's
        raise EnvironmentFailure(f"{entry!r}: the annotations have no JSON schema: {describe(error)}") from None
    return function, takes, function_schema(entry.partition(":")[2], description, takes.schema)


def check(entry: str) -> None:
    """Raises EnvironmentFailure, as `field: problem`, when the function cannot be a tool."""
    try:
        _understood(entry)
    except EnvironmentFailure as error:
        raise EnvironmentFailure(f"entry: {error}") from error


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring says of the function, in one line, and of each parameter: in `Args:` or as `:param x:`."""
    said: list[str] = []
    docs: dict[str, str] = {}
    section, last = "", ""
    for line in text.splitlines():
        heading = _SECTION.match(line)
        field = line.startswith(":")
        if heading:
            section, last = heading[1], ""
        elif not section and not field and not docs:
            said.append(line)
        elif (section in ("Args", "Arguments", "Parameters") or field) and (found := _DOCUMENTED.match(line.strip())):
            last, docs[found[1]] = found[1], found[2]
        elif last and line.strip():
            docs[last] += " " + line.strip()
    return " ".join(" ".join(said).split()), docs
