"""Conversations as tokens: what the policy sees and says, tokens in, tokens out, never tokenised twice."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from marlaas.environments import Environment, Example, Message, Outcome
from marlaas.environments.tools.parsing import Format
from marlaas.environments.tools.prompting import tool_chat
from marlaas.errors import EnvironmentFailure
from marlaas.pool import Pool
from marlaas.sampling.protocol import FinishReason, Sample, SamplingRequest

MAX_TURNS = 64

T = TypeVar("T")


@dataclass(frozen=True)
class ChatFormat:
    """How a chat becomes text: the tokenizer's template, the tools there are, and how calls are written."""

    tokenizer: Any
    tools: Sequence[dict[str, Any]] = ()
    calls: Format | Literal["auto"] = "auto"

    def text(self, messages: Sequence[Message]) -> str:
        """The chat so far, up to where the assistant speaks."""
        template = self.tokenizer.get_chat_template(tools=list(self.tools) or None)
        chat, tools = tool_chat(template, messages, self.tools, self.calls)
        return self.tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=True)

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def continuation(self, seen: str, chat: str, stopped_by_token: bool) -> list[int] | None:
        """Token ids that follow a reply when the chat has gone on.

        seen: the text before the reply, and the reply; chat: the text of the chat now. None when the template renders
        earlier turns differently once later ones are there, so that the sampled tokens would not be a prefix.
        """
        if not chat.startswith(seen):
            return None
        rest = chat[len(seen) :]
        return self.tokens(rest.removeprefix(self.tokenizer.eos_token) if stopped_by_token else rest)


@dataclass
class Transcript:
    """A conversation's tokens; `mask` is true exactly on those that the policy sampled. text: of the context."""

    text: str
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

    def add(self, sample: Sample) -> None:
        """The policy's reply to what the last transcript holds."""
        self.transcripts[-1].add_sample(sample)
        self.said.append(sample.text)
        self.generation_seconds += sample.seconds
        self.device_seconds += sample.device_seconds
        self.reused_tokens += sample.reused_tokens
        self.finish_reason = sample.finish_reason

    @property
    def sampled_tokens(self) -> int:
        return sum(sum(t.mask) for t in self.transcripts)


async def converse(
    pool: Pool,
    environment: Environment,
    example: Example,
    request: Callable[[tuple[int, ...], int, int], SamplingRequest],
    max_tokens: int,
    calls: Format | Literal["auto"] = "auto",
) -> Conversation:
    """Generates and interacts in turn until the environment is done.

    request: from the tokens so far, the turn, and how many tokens may be sampled: `max_tokens`, or what is left of
    the longest sequence in later turns. calls: how tools are called. Raises EnvironmentFailure.
    """
    run = Conversation()
    session = None

    async def timed(call: Awaitable[T]) -> T:
        started = time.perf_counter()
        try:
            return await call
        finally:
            run.calls += 1
            run.environment_seconds += time.perf_counter() - started

    run.prompt = messages = await timed(environment.reset(example))
    format = ChatFormat(pool.tokenizer, environment.tools, calls)
    run.transcripts.append(Transcript(format.text(messages)))
    tokens = format.tokens(run.transcripts[-1].text)
    try:
        for turn in range(MAX_TURNS):
            transcript = run.transcripts[-1]
            transcript.add_context(tokens)
            room = min(max_tokens, pool.longest - len(transcript.tokens))
            if turn == 0 and room < max_tokens:
                raise EnvironmentFailure(
                    f"the prompt of example {example.id} has {len(tokens)} tokens; with max_tokens {max_tokens} it "
                    f"does not fit in pool.max_sequence_tokens {pool.longest}"
                )
            if room < 1:
                raise EnvironmentFailure(
                    f"the conversation on example {example.id} outgrew pool.max_sequence_tokens {pool.longest}"
                )
            asked = request(tuple(transcript.tokens), turn, room)
            session = asked.session
            sample = await pool.generate(asked)
            run.add(sample)
            run.outcome = await timed(environment.step(example, messages, sample.text))
            if run.outcome.done:
                return run
            messages = [*messages, {"role": "assistant", "content": sample.text}, *run.outcome.messages]
            chat = format.text(messages)
            stopped = sample.finish_reason == FinishReason.STOP and sample.tokens[-1] in pool.stop_ids
            more = format.continuation(transcript.text + sample.text, chat, stopped)
            if more is None:
                run.transcripts.append(Transcript(chat))
            run.transcripts[-1].text = chat
            tokens = format.tokens(chat) if more is None else more
    finally:
        if session is not None:
            pool.end_session(session)
    raise EnvironmentFailure(f"example {example.id} was not done after {MAX_TURNS} turns")
