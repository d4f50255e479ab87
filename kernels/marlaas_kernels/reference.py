"""The definitions: what each kernel computes, written to be read. Tests hold every fast path to these."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def multi_lora(
    x_TI: torch.Tensor,
    a_SRI: Sequence[torch.Tensor],
    b_SOR: Sequence[torch.Tensor],
    scale_S: Sequence[float],
    slot_T: Sequence[int],
) -> torch.Tensor:
    """Each token's LoRA delta `[T, O]`: scale * B (A x) of the token's slot; slot -1 is the base, delta 0.

    a_SRI: one `[rank, I]` a slot; b_SOR: one `[O, rank]` a slot (ranks may differ). Hu et al. 2021, eq. 3.
    """
    delta = x_TI.new_zeros(x_TI.shape[0], b_SOR[0].shape[0])
    for token, slot in enumerate(slot_T):
        if slot >= 0:
            shrunk_R = a_SRI[slot] @ x_TI[token]
            delta[token] = scale_S[slot] * (b_SOR[slot] @ shrunk_R)
    return delta


def cold_scores(expert_V: torch.Tensor, amateur_V: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
    """CoLD scores of one position, from raw logits `[V]`; -inf where the alpha mask drops a token.

    keep(j) = e_j >= max e + log(alpha); score(j) = (1 + beta) e_j - beta a_j. O'Brien and Lewis 2023.
    Needs 0 < alpha <= 1 and beta >= 0. Raw logits do: log-softmax shifts a row by a constant.
    """
    keep = expert_V >= expert_V.max() + math.log(alpha)
    scores = (1 + beta) * expert_V - beta * amateur_V
    return torch.where(keep, scores, torch.full_like(scores, -torch.inf))
