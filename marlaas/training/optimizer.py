"""AdamW of one slot (Loshchilov and Hutter 2019): its state is two vectors as long as the adapter."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from marlaas.specs import OptimizerSpec


@dataclass
class AdamState:
    """First and second moments, fp32 `[size]`, and how many updates they have seen."""

    first: torch.Tensor
    second: torch.Tensor
    step: int = 0


def learning_rate(spec: OptimizerSpec, step: int, steps: int) -> float:
    """The rate of update `step` (0-based) of `steps`: linear warm-up, then constant or cosine to final_share."""
    if step < spec.warmup_steps:
        return spec.learning_rate * (step + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.learning_rate
    done = (step - spec.warmup_steps) / max(1, steps - spec.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return spec.learning_rate * (spec.final_share + (1 - spec.final_share) * cosine)


def clip_(gradient: torch.Tensor, max_norm: float) -> float:
    """Scales the gradient, in place, to at most that 2-norm; returns the norm before."""
    norm = float(torch.linalg.vector_norm(gradient))
    if norm > max_norm:
        gradient.mul_(max_norm / norm)
    return norm


def adamw_(weights: torch.Tensor, gradient: torch.Tensor, state: AdamState, spec: OptimizerSpec, rate: float) -> None:
    """One update of fp32 weights `[size]`, in place, with decoupled weight decay. torch.optim.AdamW's formula."""
    state.step += 1
    beta1, beta2 = spec.betas
    state.first.lerp_(gradient, 1 - beta1)
    state.second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    weights.mul_(1 - rate * spec.weight_decay)
    denominator = (state.second.sqrt() / math.sqrt(1 - beta2**state.step)).add_(spec.epsilon)
    weights.addcdiv_(state.first, denominator, value=-rate / (1 - beta1**state.step))
