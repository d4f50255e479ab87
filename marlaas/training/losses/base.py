"""What a loss is given and what it gives back, a value for each sampled token."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenInputs:
    """fp32 `[N]` each. logprobs: under the weights being trained; behaviour: as recorded when the token was sampled;
    reference: under the base model, None unless a KL term asks for it."""

    logprobs: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    reference: torch.Tensor | None = None


@dataclass(frozen=True)
class TokenLoss:
    """loss: differentiable, `[N]`, not yet averaged. clipped: bool `[N]`, where the clip cut the gradient off."""

    loss: torch.Tensor
    clipped: torch.Tensor


def kl_to_reference(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference), never negative: exp(d) - d - 1 with d = reference - logprobs.

    J. Schulman, "Approximating KL divergence" (2020), the k3 estimator.
    """
    difference = reference - logprobs
    return torch.exp(difference) - difference - 1
