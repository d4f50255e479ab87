"""How the answer is taken out of a completion."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from marlaas.environments.hosting import Served, SharedHost
from marlaas.environments.protocol import Example

if TYPE_CHECKING:
    from marlaas.specs import AnswerSpec

MAX_CHARACTERS = 65536
"""Only the last so many of a completion are read, which keeps every extraction below a few milliseconds."""

# A minus is a sign unless something is being subtracted from: "-3" and "= -3", but not "7-3" or "(2)-3".
_SIGN = r"(?:(?<![\w)\]])[-\u2212])?"
_NUMBER = re.compile(rf"{_SIGN}(?:\d{{1,3}}(?:,\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|{_SIGN}(?<!\d)\.\d+")


class Extractor:
    """Takes answers out of completions as an AnswerSpec says. A user's pattern runs in a shared host process,
    because a pattern can take exponential time and nothing else can stop it."""

    def __init__(self, spec: AnswerSpec, environment: str, seconds: float) -> None:
        self._spec, self._environment, self._seconds = spec, environment, seconds
        self._host = SharedHost(Served("marlaas.environments.answers:PatternWorker", memory_mb=512))

    async def extract(self, completion: str, example: Example) -> str | None:
        """The answer without blanks around it, or None.

        Raises EnvironmentFailure when the pattern takes longer than the spec's limit.
        """
        if self._spec.extract != "pattern":
            return extract_answer(self._spec.extract, completion)
        what, text = f"{self._environment}: answer.pattern on example {example.id}", completion[-MAX_CHARACTERS:]
        found = await self._host.call("search", self._spec.pattern, text, seconds=self._seconds, what=what)
        assert found is None or isinstance(found, str)
        return found

    async def close(self) -> None:
        """Gives up the shared process."""
        await self._host.close()


class PatternWorker:
    """What the host process of patterns serves."""

    def search(self, pattern: str, text: str) -> str | None:
        """The first group of the last match."""
        last = None
        for match in re.finditer(pattern, text):
            last = match
        return (last[1] or "").strip() or None if last else None


def extract_answer(how: str, completion: str) -> str | None:
    """The answer in a completion, or None; `how` is AnswerSpec.extract other than pattern.

    whole: all of it. last_line: its last line that is not blank. last_number: without thousands separators.
    answer_tag: the last <answer>...</answer>. boxed: the last \\boxed{...} with balanced braces.
    """
    text = completion[-MAX_CHARACTERS:].strip()
    return {
        "whole": _whole,
        "last_line": _last_line,
        "last_number": _last_number,
        "answer_tag": _answer_tag,
        "boxed": _boxed,
    }[how](text)


def _whole(text: str) -> str | None:
    return text or None


def _last_line(text: str) -> str | None:
    return text.rsplit("\n", 1)[-1].strip() or None


def _last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "").replace("\u2212", "-") if found else None


def _answer_tag(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end].strip() or None if start >= 0 else None


def _boxed(text: str) -> str | None:
    opened: list[int | None] = []  # where each open brace's content starts, or None if it is not a box's
    last: tuple[int, int] | None = None
    for at, character in enumerate(text):
        if character == "{":
            opened.append(at + 1 if text.endswith("\\boxed", 0, at) else None)
        elif character == "}" and opened:
            start = opened.pop()
            if start is not None:
                last = max(last or (start, at), (start, at))
    return text[last[0] : last[1]].strip() or None if last else None
