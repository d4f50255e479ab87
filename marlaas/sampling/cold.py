"""CoLD: contrastive LoRA decoding of batched rows. The definition is `marlaas_kernels.reference.cold_scores`."""

from __future__ import annotations

import torch


def cold_logits(
    expert_NV: torch.Tensor, amateur_NV: torch.Tensor, alpha_N: torch.Tensor, beta_N: torch.Tensor
) -> torch.Tensor:
    """fp32 scores `[N, V]` from raw logits, -inf outside of the alpha mask; softmax of a row is CoLD's distribution."""
    expert, beta = expert_NV.float(), beta_N[:, None]
    keep = expert >= expert.amax(dim=-1, keepdim=True) + alpha_N.log()[:, None]
    scores = (1 + beta) * expert - beta * amateur_NV.float()
    return scores.masked_fill(~keep, -torch.inf)
