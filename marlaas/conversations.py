"""Conversations as tokens: what the policy sees and says, tokens in, tokens out, never tokenised twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from marlaas.environments import Environment, Example, Message, Outcome
from marlaas.errors import EnvironmentFailure
from marlaas.pool import Pool
from marlaas.sampling.protocol import FinishReason, Sample, SamplingRequest

MAX_TURNS = 64


def prompt_tokens(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of the chat so far, up to where the assistant speaks."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def continuation_tokens(
    tokenizer: Any, messages: Sequence[Message], added: Sequence[Message], stopped_by_token: bool
) -> list[int]:
    """Token ids that follow the assistant's last message when `added` comes after it.

    messages: the chat, the assistant's last message included. Raises EnvironmentFailure when the chat template
    renders earlier turns differently once later ones are there, so that the sampled tokens would not be a prefix.
    """
    before = tokenizer.apply_chat_template(list(messages), tokenize=False)
    after = tokenizer.apply_chat_template([*messages, *added], tokenize=False, add_generation_prompt=True)
    said = messages[-1]["content"]
    at = before.rfind(said)
    if at < 0 or not after.startswith(before):
        raise EnvironmentFailure("the chat template changes earlier turns; a multi-turn rollout cannot extend them")
    closing = before[at + len(said) :]
    if stopped_by_token:
        closing = closing.removeprefix(tokenizer.eos_token)
    return list(tokenizer(closing + after[len(before) :], add_special_tokens=False)["input_ids"])


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


@dataclass(frozen=True)
class Conversation:
    """A finished conversation. Times in seconds; generation_seconds counts from each request's admission."""

    prompt: list[Message]
    transcript: Transcript
    said: list[str]
    outcome: Outcome
    finish_reason: FinishReason
    generation_seconds: float
    environment_seconds: float


async def converse(
    pool: Pool,
    environment: Environment,
    example: Example,
    request: Callable[[tuple[int, ...], int], SamplingRequest],
) -> Conversation:
    """Generates and interacts in turn until the environment is done.

    request: from the tokens so far and the turn. Raises EnvironmentFailure.
    """
    transcript, said = Transcript(), []
    generation_seconds = environment_seconds = 0.0
    started = time.perf_counter()
    prompt = messages = await environment.reset(example)
    environment_seconds += time.perf_counter() - started
    transcript.add_context(prompt_tokens(pool.tokenizer, messages))
    for turn in range(MAX_TURNS):
        sample = await pool.generate(request(tuple(transcript.tokens), turn))
        generation_seconds += sample.seconds
        transcript.add_sample(sample)
        said.append(sample.text)
        started = time.perf_counter()
        outcome = await environment.step(example, messages, sample.text)
        environment_seconds += time.perf_counter() - started
        if outcome.done:
            return Conversation(
                prompt, transcript, said, outcome, sample.finish_reason, generation_seconds, environment_seconds
            )
        spoken: Message = {"role": "assistant", "content": sample.text}
        messages = [*messages, spoken]
        stopped = sample.finish_reason == FinishReason.STOP and sample.tokens[-1] in pool.stop_ids
        transcript.add_context(continuation_tokens(pool.tokenizer, messages, outcome.messages, stopped))
        messages = [*messages, *outcome.messages]
    raise EnvironmentFailure(f"example {example.id} was not done after {MAX_TURNS} turns")
