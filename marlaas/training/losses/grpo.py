"""GRPO's clipped policy gradient (Shao et al. 2024), with asymmetric bounds (Yu et al. 2025, DAPO)."""

from __future__ import annotations

import torch

from marlaas.specs import AlgorithmSpec
from marlaas.training.losses.base import TokenInputs, TokenLoss, kl_to_reference


def token_loss(inputs: TokenInputs, spec: AlgorithmSpec) -> TokenLoss:
    """-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), plus the KL term if it has a coefficient.

    The ratio is against the recorded behaviour log-probs, so samples of an older version are corrected for.
    """
    # A ratio of e^20 is clipped or diverging either way; the bound keeps the product finite.
    ratio = torch.exp((inputs.logprobs - inputs.behaviour).clamp(max=20.0))
    bounded = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    loss = -torch.minimum(ratio * inputs.advantages, bounded * inputs.advantages)
    cut = (ratio * inputs.advantages) > (bounded * inputs.advantages)
    if inputs.reference is not None and spec.kl_coefficient > 0:
        loss = loss + spec.kl_coefficient * kl_to_reference(inputs.logprobs, inputs.reference)
    return TokenLoss(loss, cut.detach())
