"""What is asked of a sampler, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from marlaas.errors import RequestError


class Decoding(StrEnum):
    GREEDY = "greedy"
    SAMPLE = "sample"
    COLD = "cold"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class SamplingRequest:
    """One completion to generate. It is served by one adapter version from its first token to its last.

    owner: the tenant, for fair sharing. adapter: the name of a resident adapter version, None for the base.
    top_k 0 is no limit. alpha and beta are CoLD's. seed: of this request alone. session: names the conversation that
    the request is a turn of; its keys and values are kept for the next turn.
    """

    owner: str
    prompt: tuple[int, ...]
    adapter: str | None
    decoding: Decoding
    max_tokens: int
    stop_ids: frozenset[int]
    stop: tuple[str, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    alpha: float = 0.1
    beta: float = 0.5
    session: str | None = None

    def check(self, vocabulary: int, longest: int) -> None:
        """Raises RequestError for a request that cannot be served; `longest` is in tokens."""
        if not self.prompt:
            raise RequestError(f"{self.owner}: prompt is empty; at least one token is needed")
        if not all(0 <= t < vocabulary for t in self.prompt):
            raise RequestError(f"{self.owner}: prompt has token ids outside of [0, {vocabulary})")
        if self.max_tokens < 1 or len(self.prompt) + self.max_tokens > longest:
            raise RequestError(
                f"{self.owner}: a prompt of {len(self.prompt)} tokens and max_tokens {self.max_tokens} do not fit in "
                f"pool.max_sequence_tokens {longest}"
            )
        if self.decoding == Decoding.COLD and self.adapter is None:
            raise RequestError(f"{self.owner}: cold decoding needs an adapter as expert; none was named")
        if not (self.temperature > 0 and 0 < self.top_p <= 1 and self.top_k >= 0):
            raise RequestError(
                f"{self.owner}: temperature {self.temperature}, top_p {self.top_p}, top_k {self.top_k} are not "
                "allowed; temperature > 0, 0 < top_p <= 1, top_k >= 0 are"
            )
        if not (0 < self.alpha <= 1 and self.beta >= 0):
            raise RequestError(
                f"{self.owner}: alpha {self.alpha}, beta {self.beta} are not allowed; 0 < alpha <= 1, beta >= 0 are"
            )


@dataclass
class Sample:
    """A finished completion.

    tokens: the sampled ids, the stop token included. logprobs: natural logarithms, of the distribution each token
    was drawn from. text: decoded, without stop tokens and cut before a stop string. seconds: from the request's
    first forward pass to its last token. device_seconds: its share of the passes that it was in. reused_tokens: of
    the prompt, whose keys and values were kept from the conversation's earlier turns.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    text: str
    adapter: str | None
    seconds: float = field(compare=False)
    device_seconds: float = field(default=0.0, compare=False)
    reused_tokens: int = field(default=0, compare=False)
