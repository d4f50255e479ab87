"""Tool calls in what a model wrote, in the three ways that models write them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Format = Literal["hermes", "llama", "mistral"]

MAX_CALLS = 16
"""Of one reply; what is written beyond them is answered with one error."""

MAX_NESTING = 32
"""Of arguments: whatever handles them later may go through them by recursion."""

OPENED, CLOSED = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS = "[TOOL_CALLS]"
EXAMPLES: dict[Format, str] = {
    "hermes": OPENED + '{"name": ..., "arguments": {...}}' + CLOSED,
    "llama": '{"name": ..., "parameters": {...}} and nothing else',
    "mistral": TOOL_CALLS + '[{"name": ..., "arguments": {...}}] and nothing else',
}
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True)
class Call:
    """One call as the model wrote it; nothing is known about the tool yet."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ParsedCalls:
    """The calls of a reply in order, and what is wrong with each attempt that is none. Both empty: no attempt."""

    calls: list[Call] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class _Malformed(Exception):
    """An attempt that is no call; the text says why."""


def parse_calls(completion: str, format: Format | Literal["auto"]) -> ParsedCalls:
    """The tool calls of a completion. Any text is allowed; what precedes `</think>` is not looked at.

    hermes: each `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, with text around them as it likes.
    llama: the whole reply is `{"name": ..., "parameters": {...}}`, or several with `;` between, perhaps after
    `<|python_tag|>`. mistral: `[TOOL_CALLS]` and a list of calls; as tokenizers drop the special token, the list alone
    will do. auto: the first of hermes, mistral and llama with an attempt. Everywhere `arguments` and `parameters` mean
    the same and may be text that holds the object.
    """
    text = _spoken(completion)
    formats: tuple[Format, ...] = ("hermes", "mistral", "llama") if format == "auto" else (format,)
    for each in formats:
        parsed = _collect(_ATTEMPTS[each](text), each)
        if parsed.calls or parsed.errors:
            return parsed
    return ParsedCalls()


def _spoken(completion: str) -> str:
    """What follows the reasoning; a reasoning without an end says nothing yet."""
    _, ended, after = completion.rpartition("</think>")
    if ended:
        return after.strip()
    return "" if after.lstrip().startswith("<think>") else after.strip()


def _collect(attempts: Iterator[Any], format: Format) -> ParsedCalls:
    """attempts: each one JSON value, or the _Malformed that it is."""
    parsed = ParsedCalls()
    for number, attempt in enumerate(attempts, 1):
        if number > MAX_CALLS:
            parsed.errors.append(f"at most {MAX_CALLS} calls in one reply; the rest was not looked at")
            break
        try:
            parsed.calls.append(_call(attempt))
        except _Malformed as error:
            parsed.errors.append(f"{error}; a call is written {EXAMPLES[format]}")
    return parsed


def _hermes(text: str) -> Iterator[Any]:
    for part in text.split(OPENED)[1:]:
        body, closed, _ = part.partition(CLOSED)
        yield _json(body) if closed else _Malformed(f"{OPENED} without {CLOSED}")


def _mistral(text: str) -> Iterator[Any]:
    before, tag, body = text.partition(TOOL_CALLS)
    if not tag and not _looks_like_calls(body := before, "["):
        return
    calls = _json(body)
    if isinstance(calls, list) and calls:
        yield from calls
    else:
        yield calls if isinstance(calls, _Malformed) else _Malformed("the calls are not in a list")


def _llama(text: str) -> Iterator[Any]:
    before, tag, body = text.partition(PYTHON_TAG)
    if not tag and not _looks_like_calls(body := before, "{"):
        return
    body = body.strip()
    while body:
        value, body = _first_json(body)
        yield value
        body = body.lstrip("; \n\r\t")


def _looks_like_calls(text: str, opening: str) -> bool:
    """Whether a whole reply is an attempt at calls and not an answer that happens to be JSON."""
    head = text[:1] == opening and text[1:].lstrip("{ \n\r\t")
    return bool(head) and str(head).startswith('"name"') and any(f'"{key}"' in text for key in _ARGUMENTS)


_ATTEMPTS = {"hermes": _hermes, "mistral": _mistral, "llama": _llama}


def _call(attempt: Any) -> Call:
    if isinstance(attempt, _Malformed):
        raise attempt
    if not isinstance(attempt, dict):
        raise _Malformed("a call is not a JSON object")
    name = attempt.get("name")
    if not isinstance(name, str) or not name:
        raise _Malformed("a call has no name")
    arguments: Any = next((attempt[key] for key in _ARGUMENTS if key in attempt), {})
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        raise _Malformed(f"the arguments of {name[:64]} are not a JSON object")
    if _is_deep(arguments):
        raise _Malformed(f"the arguments of {name[:64]} are nested more than {MAX_NESTING} deep")
    return Call(name, arguments)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_NESTING):
        inside = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [item for items in inside for item in items]
    return any(isinstance(each, dict | list) for each in level)


def _json(text: str) -> Any:
    value, rest = _first_json(text.strip())
    return _Malformed("there is text after the JSON") if rest.strip() else value


def _first_json(text: str) -> tuple[Any, str]:
    """The JSON value, or the _Malformed, that a text begins with; and the text after it, none if malformed."""
    try:
        value, end = _DECODER.raw_decode(text)
    except json.JSONDecodeError as error:
        return _Malformed(f"not valid JSON: {error.msg} at character {error.pos}"), ""
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, NaN; thousands of brackets
        return _Malformed(f"not valid JSON: {str(error)[:80]}"), ""
    return value, text[end:]


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
