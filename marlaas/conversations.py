"""Conversations as tokens: what the policy sees and says, tokens in, tokens out, never tokenised twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from marlaas.environments import Environment, Example, Message, Outcome
from marlaas.environments.tools.prompting import tool_chat
from marlaas.errors import EnvironmentFailure
from marlaas.pool import Pool
from marlaas.sampling.protocol import FinishReason, Sample, SamplingRequest

MAX_TURNS = 64

Tools = Sequence[dict[str, Any]]


def prompt_tokens(tokenizer: Any, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
    """Token ids of the chat so far, up to where the assistant speaks."""
    return _tokens(tokenizer, _text(tokenizer, messages, tools, True))


def continuation_tokens(
    tokenizer: Any,
    messages: Sequence[Message],
    added: Sequence[Message],
    stopped_by_token: bool,
    tools: Tools = (),
) -> list[int] | None:
    """Token ids that follow the assistant's last message when `added` comes after it.

    messages: the chat, the assistant's last message included. None when the chat template renders earlier turns
    differently once later ones are there, so that the sampled tokens would not be a prefix.
    """
    before = _text(tokenizer, messages, tools, False)
    after = _text(tokenizer, [*messages, *added], tools, True)
    said = messages[-1]["content"]
    at = before.rfind(said)
    if at < 0 or not after.startswith(before):
        return None
    closing = before[at + len(said) :]
    if stopped_by_token:
        closing = closing.removeprefix(tokenizer.eos_token)
    return _tokens(tokenizer, closing + after[len(before) :])


def _text(tokenizer: Any, messages: Sequence[Message], tools: Tools, generate: bool) -> str:
    chat, passed = tool_chat(tokenizer.chat_template, list(messages), tools, "auto")
    return tokenizer.apply_chat_template(chat, tools=passed, tokenize=False, add_generation_prompt=generate)


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass
class Transcript:
    """A conversation's tokens; `mask` is true exactly on those that the policy sampled."""

    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def add_context(self, tokens: Sequence[int]) -> None:
        """Tokens from the prompt, a tool or the template."""
        self.tokens += tokens
        self.mask += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)

    def add_sample(self, sample: Sample) -> None:
        """Tokens that the policy sampled."""
        self.tokens += sample.tokens
        self.mask += [True] * len(sample.tokens)
        self.logprobs += sample.logprobs


@dataclass
class Conversation:
    """A conversation, finished when it has an outcome.

    transcripts: mostly one; one more each time that the chat template could not extend the tokens before. Times in
    seconds; generation_seconds counts from each request's admission. calls: of the environment. reused_tokens: of
    prompts, which were not computed again.
    """

    prompt: list[Message] = field(default_factory=list)
    transcripts: list[Transcript] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    outcome: Outcome | None = None
    finish_reason: FinishReason = FinishReason.STOP
    generation_seconds: float = 0.0
    environment_seconds: float = 0.0
    device_seconds: float = 0.0
    calls: int = 0
    reused_tokens: int = 0

    @property
    def sampled_tokens(self) -> int:
        return sum(sum(t.mask) for t in self.transcripts)


async def converse(
    pool: Pool,
    environment: Environment,
    example: Example,
    request: Callable[[tuple[int, ...], int, int], SamplingRequest],
    max_tokens: int,
) -> Conversation:
    """Generates and interacts in turn until the environment is done.

    request: from the tokens so far, the turn, and how many tokens may be sampled: `max_tokens`, or what is left of
    the longest sequence in later turns. Raises EnvironmentFailure.
    """
    run = Conversation()
    session = None

    async def timed(call: Any) -> Any:
        started = time.perf_counter()
        try:
            return await call
        finally:
            run.calls += 1
            run.environment_seconds += time.perf_counter() - started

    run.prompt = messages = await timed(environment.reset(example))
    tools = environment.tools
    tokens: list[int] | None = prompt_tokens(pool.tokenizer, messages, tools)
    try:
        for turn in range(MAX_TURNS):
            if turn == 0 or tokens is None:
                run.transcripts.append(Transcript())
                tokens = prompt_tokens(pool.tokenizer, messages, tools)
            transcript = run.transcripts[-1]
            transcript.add_context(tokens)
            room = max_tokens if turn == 0 else min(max_tokens, pool.longest - len(transcript.tokens))
            if room < 1:
                raise EnvironmentFailure(
                    f"the conversation on example {example.id} outgrew pool.max_sequence_tokens {pool.longest}"
                )
            asked = request(tuple(transcript.tokens), turn, room)
            session = asked.session
            sample = await pool.generate(asked)
            run.generation_seconds += sample.seconds
            run.device_seconds += sample.device_seconds
            run.reused_tokens += sample.reused_tokens
            run.finish_reason = sample.finish_reason
            transcript.add_sample(sample)
            run.said.append(sample.text)
            run.outcome = await timed(environment.step(example, messages, sample.text))
            if run.outcome.done:
                return run
            messages = [*messages, {"role": "assistant", "content": sample.text}]
            stopped = sample.finish_reason == FinishReason.STOP and sample.tokens[-1] in pool.stop_ids
            tokens = continuation_tokens(pool.tokenizer, messages, run.outcome.messages, stopped, tools)
            messages = [*messages, *run.outcome.messages]
    finally:
        if session is not None:
            pool.end_session(session)
    raise EnvironmentFailure(f"example {example.id} was not done after {MAX_TURNS} turns")
