"""What a tool takes: its schema for the model, and the check of what the model wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, PydanticSchemaGenerationError, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from typing_extensions import TypedDict

MAX_TEXT = 4096
"""Characters of one answer to the model; the rest is cut off."""

MAX_ERROR = 400
"""Characters of one that says what is wrong; users' exceptions may be long."""

_SHOWN = 3  # problems of one call


class ToolError(Exception):
    """A call that cannot be answered. The text is for the model: what is wrong, and what is allowed."""


class Parameters:
    """Named and annotated parameters, some of which may be left out."""

    def __init__(
        self,
        annotations: Mapping[str, Any],
        optional: frozenset[str] = frozenset(),
        docs: Mapping[str, str] | None = None,
    ) -> None:
        """docs: what is said of each parameter. Raises TypeError when an annotation has no JSON schema."""
        fields: dict[str, Any] = {}
        for name, annotation in annotations.items():
            described: Any = Annotated[annotation, Field(description=(docs or {}).get(name))]
            fields[name] = NotRequired[described] if name in optional else described
        make: Any = TypedDict
        made = make("parameters", fields)
        made.__pydantic_config__ = ConfigDict(extra="forbid")
        try:
            self._adapter: TypeAdapter[dict[str, Any]] = TypeAdapter(made)
            self.schema = _without_titles(self._adapter.json_schema())
        except (PydanticSchemaGenerationError, PydanticUserError) as error:
            raise TypeError(str(error).split("\n", 1)[0]) from None
        self._allowed = ", ".join(f"{name} (optional)" if name in optional else name for name in annotations)

    def checked(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments as the annotated types. Raises ToolError."""
        try:
            return self._adapter.validate_python(arguments)
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, e['loc']))}: {_said(e)}" for e in error.errors()[:_SHOWN]]
            raise ToolError(f"{'; '.join(problems)}; parameters are {self._allowed or 'none'}") from None


def _said(problem: Any) -> str:
    known = {"missing": "is missing", "extra_forbidden": "is not a parameter"}
    return known.get(problem["type"]) or problem["msg"][0].lower() + problem["msg"][1:]


def _without_titles(schema: Any) -> Any:
    """pydantic names everything twice; the model reads every token of it. Properties named `title` are kept."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key != "title" or isinstance(value, dict)}
    return {key: _without_titles(value) for key, value in kept.items()}


def function_schema(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """A tool as chat templates and the OpenAI API take it."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
