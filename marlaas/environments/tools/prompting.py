"""How a chat template is told of tools: through its `tools`, or in words where it takes none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from marlaas.environments.protocol import Message
from marlaas.environments.tools.parsing import PYTHON_TAG, TOOL_CALLS, Format

_JSON_CALL = re.compile(r'\{\\?"name\\?":')  # templates show how to write a call, in quotes that may be escaped
_HEAD = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

"""
_WORDING: dict[Format, str] = {
    "hermes": """For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>""",
    "llama": """To call a function, respond with nothing but a json object:
{"name": <function-name>, "parameters": <args-json-object>}""",
    "mistral": """To call functions, respond with nothing but:
[TOOL_CALLS][{"name": <function-name>, "arguments": <args-json-object>}]""",
}


def tool_chat(
    chat_template: str,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    format: Format | Literal["auto"],
) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """What to give `tokenizer.apply_chat_template(messages, tools=...)` for a conversation with tools.

    A template that takes tools gets the messages as they are and the schemas. For any other, and where `format` is not
    the template's own, the second is None, a system message describes the tools, and what they answered becomes user
    messages in `<tool_response>` tags. Longer conversations give longer lists that begin with the same messages.
    """
    if not tools:
        return list(messages), None
    own = call_format(chat_template)
    if template_takes_tools(chat_template) and format in ("auto", own):
        return list(messages), [dict(tool) for tool in tools]
    told = with_tool_prompt(messages, tools, own if format == "auto" else format)
    return _answers_from_user(told), None


def with_tool_prompt(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], format: Format) -> list[Message]:
    """The messages with the tools described in the system message, which is made if there is none.

    The words are those of Qwen and Hermes, but for how a call is written in other formats.
    """
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _HEAD.replace("{signatures}", signatures) + _WORDING[format]
    if messages and messages[0]["role"] == "system":
        before = messages[0]["content"]
        return [{"role": "system", "content": f"{before}\n\n{text}" if before else text}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _answers_from_user(messages: Sequence[Message]) -> list[Message]:
    """Tools' messages as a user's, those in a row in one: templates without tools may insist that roles alternate."""
    made: list[Message] = []
    for at, message in enumerate(messages):
        if message["role"] != "tool":
            made.append(message)
            continue
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        if at and messages[at - 1]["role"] == "tool":
            content = f"{made.pop()['content']}\n{content}"
        made.append({"role": "user", "content": content})
    return made


def template_takes_tools(chat_template: str) -> bool:
    """Whether the template shows `tools` to the model, asks for calls that `parse_calls` reads, and takes tools'
    messages of text alone: those that read `tool_call_id`, as Mistral's, need ids, which our messages have not."""
    shows = re.search(r"\btools\b", chat_template) and _JSON_CALL.search(chat_template)
    return bool(shows) and "tool_call_id" not in chat_template


def call_format(chat_template: str) -> Format:
    """How models of that template write calls; hermes where it does not say."""
    if TOOL_CALLS in chat_template:
        return "mistral"
    if PYTHON_TAG in chat_template or "ipython" in chat_template:
        return "llama"
    return "hermes"
