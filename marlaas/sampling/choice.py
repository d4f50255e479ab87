"""From logits to tokens: each request's next token by its own decoding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from marlaas.cpu_kernels import as_array, runs_here
from marlaas.sampling.cold import cold_logits
from marlaas.sampling.distribution import adjusted_logits, draw, uniforms
from marlaas.sampling.protocol import Decoding, SamplingRequest


def choose_tokens(
    requests: Sequence[SamplingRequest], positions: Sequence[int], logits: torch.Tensor
) -> tuple[list[int], list[float]]:
    """The next token of each request and its log-prob.

    logits: `[rows, V]`, the rows of each request in order (two for CoLD: expert, amateur); positions: how many
    tokens each request has sampled so far.
    """
    starts = np.cumsum([0, *(2 if r.decoding == Decoding.COLD else 1 for r in requests)])
    tokens = np.zeros(len(requests), dtype=np.int64)
    logprobs = np.zeros(len(requests))
    for decoding in Decoding:
        which = [i for i, r in enumerate(requests) if r.decoding == decoding]
        if not which:
            continue
        at = torch.as_tensor(starts[which], device=logits.device)
        chosen = [requests[i] for i in which]
        if decoding == Decoding.SAMPLE:
            token_N, logprob_N = _sample(chosen, [positions[i] for i in which], logits[at])
        elif decoding == Decoding.GREEDY:
            token_N, logprob_N = greedy(logits[at])
        else:
            alpha_N, beta_N = _column(chosen, "alpha", logits), _column(chosen, "beta", logits)
            token_N, logprob_N = greedy(cold_logits(logits[at].float(), logits[at + 1], alpha_N, beta_N))
        tokens[which] = token_N.cpu().numpy()
        logprobs[which] = logprob_N.cpu().numpy()
    return tokens.tolist(), logprobs.tolist()


def _sample(
    requests: Sequence[SamplingRequest], positions: Sequence[int], logits_NV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    temperature_N = _column(requests, "temperature", logits_NV)
    uniform_N = torch.as_tensor(uniforms(np.array([r.seed for r in requests]), np.array(positions)))
    if all(r.top_k == 0 and r.top_p == 1 for r in requests):
        return draw_at(logits_NV, temperature_N, uniform_N)
    top_k = torch.tensor([r.top_k for r in requests], device=logits_NV.device)
    adjusted = adjusted_logits(logits_NV, temperature_N, top_k, _column(requests, "top_p", logits_NV))
    return draw_at(adjusted, torch.ones_like(temperature_N), uniform_N)


def draw_at(
    logits_NV: torch.Tensor, temperature_N: torch.Tensor, uniform_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`distribution.draw` of logits over a temperature, by the processor's kernel where it runs."""
    if not runs_here(logits_NV.device, logits_NV.dtype):
        return draw(logits_NV.float() / temperature_N[:, None], uniform_N.to(logits_NV.device))
    from marlaas_kernels.cpu import vocabulary

    token_N, logprob_N = _results(len(logits_NV))
    inverse_N, logits_ = (1 / temperature_N).numpy(), as_array(logits_NV.contiguous())
    vocabulary.draw(logits_, inverse_N, uniform_N.numpy(), token_N.numpy(), logprob_N.numpy())
    return token_N, logprob_N


def greedy(logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first of each row's likeliest tokens (int64 `[N]`), and its log-prob (fp32 `[N]`)."""
    if not runs_here(logits_NV.device, logits_NV.dtype):
        token_N = logits_NV.argmax(dim=-1)
        chosen_N = logits_NV.gather(1, token_N[:, None]).squeeze(1).float()
        return token_N, chosen_N - torch.logsumexp(logits_NV.float(), dim=-1)
    from marlaas_kernels.cpu import vocabulary

    token_N, logprob_N = _results(len(logits_NV))
    vocabulary.greedy(as_array(logits_NV.contiguous()), token_N.numpy(), logprob_N.numpy())
    return token_N, logprob_N


def _results(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)


def _column(requests: Sequence[SamplingRequest], name: str, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([getattr(r, name) for r in requests], dtype=torch.float32, device=like.device)
