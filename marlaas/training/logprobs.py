"""Log-probs of given tokens from hidden states, without ever holding all logits.

The head is applied in chunks; backward computes a chunk's logits again instead of keeping them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from marlaas.sampling.distribution import adjusted_logits
from marlaas.transformer import Transformer

_CHUNK = 512


@dataclass(frozen=True)
class Targets:
    """The sampled tokens and how they were drawn, `[N]` each: int64 tokens and top_k, fp32 temperature and top_p."""

    tokens: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor

    def chunk(self, start: int) -> Targets:
        window = slice(start, start + _CHUNK)
        return Targets(self.tokens[window], self.temperature[window], self.top_k[window], self.top_p[window])


def token_logprobs(
    transformer: Transformer, hidden_NH: torch.Tensor, targets: Targets
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target (fp32 `[N]`, differentiable) and the entropy of its distribution (fp32 `[N]`, not)."""
    return _TokenLogprobs.apply(hidden_NH, transformer, targets)


def _chunks(
    transformer: Transformer, hidden_NH: torch.Tensor, targets: Targets
) -> Iterator[tuple[slice, Targets, torch.Tensor]]:
    for start in range(0, len(hidden_NH), _CHUNK):
        part = targets.chunk(start)
        window = slice(start, start + len(part.tokens))
        raw = transformer.logits(hidden_NH[window])
        yield window, part, adjusted_logits(raw, part.temperature, part.top_k, part.top_p, part.tokens)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: torch.Tensor, transformer: Transformer, targets: Targets
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.empty(len(hidden_NH), dtype=torch.float32, device=hidden_NH.device)
        entropy = torch.empty_like(logprobs)
        for window, part, logits in _chunks(transformer, hidden_NH, targets):
            all_logprobs = torch.log_softmax(logits, dim=-1)
            logprobs[window] = all_logprobs.gather(1, part.tokens[:, None]).squeeze(1)
            # A token that top_k or top_p dropped has log-prob -inf and adds nothing.
            entropy[window] = torch.special.entr(all_logprobs.exp_()).sum(dim=-1)
        ctx.save_for_backward(hidden_NH)
        ctx.transformer, ctx.targets = transformer, targets
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (hidden_NH,) = ctx.saved_tensors
        dlogprob_N = grads[0]
        dhidden_NH = torch.empty_like(hidden_NH)
        for window, part, logits in _chunks(ctx.transformer, hidden_NH, ctx.targets):
            # d logprob / d logits = (one_hot - probs) / temperature; 0 where a token was dropped.
            weight = dlogprob_N[window] / part.temperature
            dlogits = torch.softmax(logits, dim=-1).mul_(-weight[:, None])
            dlogits.scatter_add_(1, part.tokens[:, None], weight[:, None])
            dhidden_NH[window] = dlogits.to(hidden_NH.dtype) @ ctx.transformer.head
        return dhidden_NH, None, None
