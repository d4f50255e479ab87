"""What an update reports about one job's step, summed over its micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from marlaas.training.advantages import GroupAdvantages
from marlaas.training.batch import TrainingBatch
from marlaas.training.losses.base import kl_to_reference


@dataclass
class TokenSums:
    """Sums over sampled tokens; `reference_tokens` counts those whose base log-prob was computed.

    cap: above which importance weights (trainer's probability over the sampler's) are truncated.
    """

    cap: float
    tokens: int = 0
    loss: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    gap: float = 0.0
    importance: float = 0.0
    truncated: float = 0.0
    kl: float = 0.0
    reference_tokens: int = 0

    def add(
        self,
        loss: torch.Tensor,
        entropy: torch.Tensor,
        clipped: torch.Tensor,
        logprobs: torch.Tensor,
        behaviour: torch.Tensor,
        reference: torch.Tensor | None,
    ) -> None:
        """Adds one micro-batch's tokens, `[n]` each; reference may be of the first tokens only."""
        self.tokens += len(logprobs)
        self.loss += float(loss.sum())
        self.entropy += float(entropy.sum())
        self.clipped += float(clipped.sum())
        self.gap += float((logprobs - behaviour).abs().sum())
        weights = torch.exp((logprobs - behaviour).clamp(max=20.0))
        self.importance += float(weights.clamp(max=self.cap).sum())
        self.truncated += float((weights > self.cap).sum())
        if reference is not None:
            self.kl += float(kl_to_reference(logprobs[: len(reference)], reference).sum())
            self.reference_tokens += len(reference)


def step_metrics(batch: TrainingBatch, groups: GroupAdvantages, sums: TokenSums) -> dict[str, float]:
    """Named metrics of one step.

    Those of tokens (loss to kl_to_base) are over the groups that train: without a KL term, those with a signal.
    logprob_gap: mean |trainer - sampler| log-prob; at staleness 0 it is numerics alone. importance_weight: mean of
    the ratio of their probabilities, truncated at the spec's cap; truncated_share: of tokens above it. kl_to_base: k3
    estimate, on all sampled tokens if the loss has a KL term, else on the step's first packed row.
    """
    rewards = groups.rewards
    n, sampled = sums.tokens, sum(int(s.mask.sum()) for s in batch.samples)
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "saturated_share": groups.saturated_share,
        "loss": sums.loss / n,
        "entropy": sums.entropy / n,
        "clip_share": sums.clipped / n,
        "logprob_gap": sums.gap / n,
        "importance_weight": sums.importance / n,
        "truncated_share": sums.truncated / n,
        "kl_to_base": sums.kl / max(1, sums.reference_tokens),
        "staleness": float(batch.staleness),
        "sampled_tokens": float(sampled),
        "completion_tokens_mean": sampled / len(rewards),
    }
