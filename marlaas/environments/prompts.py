"""How a question becomes the chat messages that the policy sees first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from marlaas.environments.protocol import Message

if TYPE_CHECKING:
    from marlaas.specs import PromptSpec


def prompt_messages(spec: PromptSpec, question: str) -> list[Message]:
    """The system message, if any; the spec's examples as earlier turns; the question, set in the template."""
    messages: list[Message] = []
    if spec.system is not None:
        messages.append({"role": "system", "content": spec.system})
    for asked, reply in spec.examples:
        messages.append({"role": "user", "content": _set(spec.template, asked)})
        messages.append({"role": "assistant", "content": reply})
    messages.append({"role": "user", "content": _set(spec.template, question)})
    return messages


def _set(template: str, question: str) -> str:
    # Not str.format: templates and questions may hold braces of their own.
    return question.join(template.split("{question}"))
