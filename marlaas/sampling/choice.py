"""From logits to tokens: each request's next token by its own decoding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

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
        else:
            scores = logits[at].float()
            if decoding == Decoding.COLD:
                scores = cold_logits(
                    scores, logits[at + 1], _column(chosen, "alpha", logits), _column(chosen, "beta", logits)
                )
            token_N = scores.argmax(dim=-1)
            logprob_N = scores.gather(1, token_N[:, None]).squeeze(1) - torch.logsumexp(scores, dim=-1)
        tokens[which] = token_N.cpu().numpy()
        logprobs[which] = logprob_N.cpu().numpy()
    return tokens.tolist(), logprobs.tolist()


def _sample(
    requests: Sequence[SamplingRequest], positions: Sequence[int], logits_NV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    top_k = torch.tensor([r.top_k for r in requests], device=logits_NV.device)
    adjusted = adjusted_logits(
        logits_NV, _column(requests, "temperature", logits_NV), top_k, _column(requests, "top_p", logits_NV)
    )
    u = uniforms(np.array([r.seed for r in requests]), np.array(positions))
    return draw(adjusted, torch.as_tensor(u, device=logits_NV.device))


def _column(requests: Sequence[SamplingRequest], name: str, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([getattr(r, name) for r in requests], dtype=torch.float32, device=like.device)
