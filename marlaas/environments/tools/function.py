"""The near side of a user's function, which runs in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from marlaas.environments.hosting import START_SECONDS, Host, Served, start_problem
from marlaas.environments.tools.parameters import ToolError
from marlaas.errors import EnvironmentFailure

if TYPE_CHECKING:
    from marlaas.specs import FunctionToolSpec, ToolsSpec


class Function:
    """The tool. Its process is its own, so that a call which hangs or crashes ends no other tool's."""

    def __init__(self, spec: FunctionToolSpec, tools: ToolsSpec, folder: Path) -> None:
        self.name = spec.name
        self._entry, self._seconds = spec.entry, tools.timeout_seconds
        self._host = Host(_served(spec, tools, folder, "UserFunction"))

    async def schema(self) -> dict[str, Any]:
        """As the function's signature says. Raises EnvironmentFailure when it cannot be a tool."""
        schema: dict[str, Any] = await self._host.call("schema", seconds=START_SECONDS, what=self._entry)
        return schema

    async def call(self, arguments: dict[str, Any]) -> str:
        """What the function returned. Raises ToolError, also when it raised, took too long or ended its process."""
        try:
            answer = await self._host.call("call", arguments, seconds=self._seconds, what=self.name)
        except EnvironmentFailure as error:
            raise ToolError(str(error)) from None
        if "error" in answer:
            raise ToolError(answer["error"])
        text: str = answer["text"]
        return text

    async def close(self) -> None:
        """Ends the process."""
        await self._host.close()


def _served(spec: FunctionToolSpec, tools: ToolsSpec, folder: Path, entry: str) -> Served:
    return Served(
        entry=f"marlaas.environments.tools.user_function:{entry}",
        arguments={"entry": spec.entry},
        path=str((folder / (spec.path or "")).expanduser().resolve()),
        memory_mb=tools.memory_mb,
        concurrency=tools.concurrency,
    )


def check_function(spec: FunctionToolSpec, tools: ToolsSpec, folder: Path) -> str | None:
    """What keeps the function from being a tool, or None. Imports it, in a process of its own."""
    served = _served(spec, tools, folder, "check")
    if not Path(served.path or "").is_dir():
        return f"path: {str(spec.path)!r} is not a folder"
    return start_problem(served, spec.entry)
