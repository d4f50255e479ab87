"""Policy gradient with truncated importance weights (Espeholt et al. 2018, V-trace; Yao et al. 2025)."""

from __future__ import annotations

import torch

from marlaas.specs import AlgorithmSpec
from marlaas.training.losses.base import TokenInputs, TokenLoss, kl_to_reference


def token_loss(inputs: TokenInputs, spec: AlgorithmSpec) -> TokenLoss:
    """-min(ratio, cap) * A * log pi, the weight taken as a constant, plus the KL term if it has a coefficient.

    The ratio is of the trainer's probability to the one recorded when the token was sampled: it corrects for an
    older version and for numerics alike. Unlike a clip it never cuts a token's gradient off.
    """
    ratio = torch.exp((inputs.logprobs.detach() - inputs.behaviour).clamp(max=20.0))
    loss = -ratio.clamp(max=spec.importance_cap) * inputs.advantages * inputs.logprobs
    if inputs.reference is not None and spec.kl_coefficient > 0:
        loss = loss + spec.kl_coefficient * kl_to_reference(inputs.logprobs, inputs.reference)
    return TokenLoss(loss, torch.zeros_like(ratio, dtype=torch.bool))
