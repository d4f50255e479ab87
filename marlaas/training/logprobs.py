"""Log-probs of given tokens from hidden states, without ever holding all logits.

The head is applied in chunks; backward computes a chunk's logits again instead of keeping them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from marlaas.cpu_kernels import as_array, runs_here
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

    @property
    def unlimited(self) -> bool:
        """Whether every token was drawn from the whole vocabulary."""
        return not bool(((self.top_k > 0) | (self.top_p < 1)).any())


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
        yield window, part, transformer.logits(hidden_NH[window])


def logprobs_and_entropy(raw_NV: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row of the model's logits, fp32 `[N]`: the target's log-prob as it was drawn, and the entropy."""
    if targets.unlimited and runs_here(raw_NV.device, raw_NV.dtype):
        from marlaas_kernels.cpu import vocabulary

        logprob_N, entropy_N = (torch.empty(len(raw_NV), dtype=torch.float32) for _ in range(2))
        inverse_N, tokens_N = (1 / targets.temperature).numpy(), targets.tokens.numpy()
        vocabulary.logprobs(as_array(raw_NV), inverse_N, tokens_N, logprob_N.numpy(), entropy_N.numpy())
        return logprob_N, entropy_N
    all_logprobs = torch.log_softmax(_adjusted(raw_NV, targets), dim=-1)
    logprob_N = all_logprobs.gather(1, targets.tokens[:, None]).squeeze(1)
    # A token that top_k or top_p dropped has log-prob -inf and adds nothing.
    return logprob_N, torch.special.entr(all_logprobs.exp_()).sum(dim=-1)


def logits_gradient(raw_NV: torch.Tensor, targets: Targets, dlogprob_N: torch.Tensor) -> torch.Tensor:
    """The gradient with respect to the model's logits, in their dtype; may reuse their memory.

    d logprob / d logits = (one_hot - probs) / temperature; 0 where a token was dropped.
    """
    if targets.unlimited and runs_here(raw_NV.device, raw_NV.dtype):
        from marlaas_kernels.cpu import vocabulary

        inverse_N, tokens_N = (1 / targets.temperature).numpy(), targets.tokens.numpy()
        vocabulary.logprob_gradient_(as_array(raw_NV), inverse_N, tokens_N, dlogprob_N.contiguous().numpy())
        return raw_NV
    weight_N = dlogprob_N / targets.temperature
    dlogits = torch.softmax(_adjusted(raw_NV, targets), dim=-1).mul_(-weight_N[:, None])
    return dlogits.scatter_add_(1, targets.tokens[:, None], weight_N[:, None]).to(raw_NV.dtype)


def _adjusted(raw_NV: torch.Tensor, targets: Targets) -> torch.Tensor:
    return adjusted_logits(raw_NV, targets.temperature, targets.top_k, targets.top_p, targets.tokens)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: torch.Tensor, transformer: Transformer, targets: Targets
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.empty(len(hidden_NH), dtype=torch.float32, device=hidden_NH.device)
        entropy = torch.empty_like(logprobs)
        for window, part, logits in _chunks(transformer, hidden_NH, targets):
            logprobs[window], entropy[window] = logprobs_and_entropy(logits, part)
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
            dhidden_NH[window] = logits_gradient(logits, part, dlogprob_N[window]) @ ctx.transformer.head
        return dhidden_NH, None, None
