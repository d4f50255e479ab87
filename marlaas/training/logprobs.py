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
) -> Iterator[tuple[slice, Targets, torch.Tensor, torch.Tensor]]:
    for start in range(0, len(hidden_NH), _CHUNK):
        part = targets.chunk(start)
        window = slice(start, start + len(part.tokens))
        logits = adjusted_logits(
            transformer.logits(hidden_NH[window]), part.temperature, part.top_k, part.top_p, part.tokens
        )
        yield window, part, logits, torch.logsumexp(logits, dim=-1)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: torch.Tensor, transformer: Transformer, targets: Targets
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.empty(len(hidden_NH), dtype=torch.float32, device=hidden_NH.device)
        entropy = torch.empty_like(logprobs)
        for window, part, logits, total in _chunks(transformer, hidden_NH, targets):
            logprobs[window] = logits.gather(1, part.tokens[:, None]).squeeze(1) - total
            probs = torch.exp(logits - total[:, None])
            # 0 * -inf is not a number: a dropped token adds nothing.
            entropy[window] = total - torch.nan_to_num(probs * logits, nan=0.0, neginf=0.0).sum(dim=-1)
        ctx.save_for_backward(hidden_NH)
        ctx.transformer, ctx.targets = transformer, targets
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (hidden_NH,) = ctx.saved_tensors
        dlogprob_N = grads[0]
        dhidden_NH = torch.empty_like(hidden_NH)
        for window, part, logits, total in _chunks(ctx.transformer, hidden_NH, ctx.targets):
            # d logprob / d logits = (one_hot - probs) / temperature; 0 where a token was dropped.
            dlogits = torch.exp(logits - total[:, None]).neg_()
            dlogits.scatter_add_(1, part.tokens[:, None], torch.ones_like(total)[:, None])
            dlogits.mul_((dlogprob_N[window] / part.temperature)[:, None])
            dhidden_NH[window] = dlogits.to(hidden_NH.dtype) @ ctx.transformer.head
        return dhidden_NH, None, None
