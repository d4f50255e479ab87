"""The search for the next examples of a stream: distinct questions, none that is held out, never for ever."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from marlaas.environments.protocol import text_key
from marlaas.errors import EnvironmentFailure

TRIES_EACH = 50
TRIES_MORE = 1000


def next_distinct(
    at: Callable[[int], dict[str, Any]], start: int, count: int, exclude: Collection[str]
) -> tuple[list[tuple[int, dict[str, Any]]], int]:
    """The next `count` (index, item) from `start` on with distinct questions, and the index after the last.

    at: the item of an index, with its `question`; IndexError when there are no more. exclude: question keys that
    are skipped. Raises EnvironmentFailure when the stream ends, or after 50 tries for each and 1000 more.
    """
    found: list[tuple[int, dict[str, Any]]] = []
    seen = set(exclude)
    limit = start + TRIES_EACH * count + TRIES_MORE
    index = start
    while len(found) < count:
        if index == limit:
            raise EnvironmentFailure(_too_few(count, len(found), f"in {index - start} tries", exclude))
        try:
            item = at(index)
        except IndexError:
            raise EnvironmentFailure(_too_few(count, len(found), "and there are no more", exclude)) from None
        key = text_key(item["question"])
        if key not in seen:
            seen.add(key)
            found.append((index, item))
        index += 1
    return found, index


def _too_few(count: int, found: int, how: str, exclude: Collection[str]) -> str:
    rest = f" beside {len(exclude)} held out" if exclude else ""
    return f"{count} distinct questions are asked for; {found} were found{rest}, {how}"
