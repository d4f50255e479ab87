"""From logits to the distribution that is sampled, and to tokens. Trainer and sampler share it.

The order is the usual one: temperature, then top_k, then top_p. Log-probs are those of the resulting distribution.
"""

from __future__ import annotations

import numpy as np
import torch

_BLOCK = 256


def adjusted_logits(
    logits_NV: torch.Tensor,
    temperature_N: torch.Tensor,
    top_k_N: torch.Tensor,
    top_p_N: torch.Tensor,
    always_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp32 logits of the sampled distribution, `[N, V]`; -inf where top_k or top_p drops a token.

    temperature_N, top_p_N: fp32; top_k_N: int64, 0 for no limit. always_N: a token id a row that is kept whatever
    the limits say (the trainer passes the token that was drawn, so that its log-prob exists under new weights).
    """
    logits = logits_NV.float()
    if not bool((temperature_N == 1).all()):
        logits = logits / temperature_N[:, None]
    limited = ((top_k_N > 0) | (top_p_N < 1)).nonzero().squeeze(1)
    if len(limited) == 0:
        return logits
    always = None if always_N is None else always_N[limited]
    kept = _kept(logits[limited], top_k_N[limited], top_p_N[limited], always)
    if len(limited) == len(logits):
        return logits.masked_fill(~kept, -torch.inf)
    return logits.index_copy(0, limited, logits[limited].masked_fill(~kept, -torch.inf))


def _kept(
    logits_NV: torch.Tensor, top_k_N: torch.Tensor, top_p_N: torch.Tensor, always_N: torch.Tensor | None
) -> torch.Tensor:
    ordered, order = logits_NV.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits_NV.shape[1], device=logits_NV.device)[None, :]
    within_k = (top_k_N[:, None] == 0) | (rank < top_k_N[:, None])
    probs = ordered.masked_fill(~within_k, -torch.inf).softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    within_p = (mass_before < top_p_N[:, None]) | (top_p_N[:, None] >= 1)
    kept = torch.zeros_like(within_k.expand_as(logits_NV)).scatter(1, order, within_k & within_p)
    return kept if always_N is None else kept.scatter(1, always_N[:, None], True)


def draw(logits_NV: torch.Tensor, uniform_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (int64 `[N]`) by inverse transform of one uniform in [0, 1) a row, and their log-probs (fp32 `[N]`).

    Two levels, blocks of the vocabulary and then inside one, with sums in fp64: one pass over the probabilities.
    """
    rows = torch.arange(len(logits_NV), device=logits_NV.device)
    total_N = torch.logsumexp(logits_NV, dim=-1)
    probs = torch.exp(logits_NV - total_N[:, None])
    padding = -probs.shape[1] % _BLOCK
    blocks = torch.nn.functional.pad(probs, (0, padding)).view(len(probs), -1, _BLOCK)
    block_ends = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = uniform_N.double() * block_ends[:, -1]
    block = _first_above(block_ends, target)
    before = torch.where(block > 0, block_ends[rows, (block - 1).clamp(min=0)], 0.0)
    inside = blocks[rows, block].double().cumsum(dim=-1)
    # A rounding hair beyond the end lands on the last token that has any mass.
    offset = _first_above(inside, torch.minimum(target - before, inside[:, -1] * (1 - 1e-12)))
    tokens = block * _BLOCK + offset
    return tokens, logits_NV[rows, tokens] - total_N


def _first_above(ends_NK: torch.Tensor, target_N: torch.Tensor) -> torch.Tensor:
    return torch.searchsorted(ends_NK, target_N[:, None], right=True).squeeze(1).clamp(max=ends_NK.shape[1] - 1)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One float64 in [0, 1) for each (seed, position): SplitMix64 (Steele et al. 2014) as a counter-based generator.

    A request draws the same numbers whatever else is in the batch.
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds.astype(np.uint64)) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
