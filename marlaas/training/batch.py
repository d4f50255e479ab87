"""What a tenant brings to an update, and what it gets back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from marlaas.errors import BatchError


@dataclass(frozen=True)
class TrainingSample:
    """One sampled conversation. The three sequences are equally long; logprobs are 0 where the mask is false.

    mask is true exactly on tokens the policy sampled. temperature, top_p and top_k are the sampler's. conversation:
    equal for samples that are turns of one conversation, each with the conversation's reward; None: it is whole.
    """

    group: str
    tokens: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    reward: float
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    conversation: str | None = None


@dataclass(frozen=True)
class TrainingBatch:
    """One step's samples of one job. `staleness` is in versions: the trainer's less the sampler's."""

    job: str
    samples: Sequence[TrainingSample]
    staleness: float = 0.0

    def check(self, vocabulary: int, longest: int) -> None:
        """Raises BatchError, naming the sample, for anything that could harm the shared pass."""
        if not self.samples:
            raise BatchError(f"{self.job}: the batch has no samples")
        for i, s in enumerate(self.samples):
            where = f"{self.job}: sample {i}"
            if not len(s.tokens) == len(s.mask) == len(s.logprobs):
                raise BatchError(
                    f"{where}: {len(s.tokens)} tokens, {len(s.mask)} mask values and {len(s.logprobs)} logprobs; "
                    "they must be equally many"
                )
            if len(s.tokens) > longest:
                raise BatchError(f"{where}: {len(s.tokens)} tokens; pool.train_tokens allows {longest}")
            if not s.mask.any() or s.mask[0]:
                raise BatchError(f"{where}: the mask must have a sampled token, and not the first")
            if s.tokens.min() < 0 or s.tokens.max() >= vocabulary:
                raise BatchError(f"{where}: token ids must be in [0, {vocabulary})")
            if not math.isfinite(s.reward):
                raise BatchError(f"{where}: reward {s.reward} is not finite")
            if not np.isfinite(s.logprobs).all() or (s.logprobs > 1e-3).any():
                raise BatchError(f"{where}: logprobs must be finite and at most 0")


@dataclass(frozen=True)
class UpdateResult:
    """An update that was applied: the adapter version it made, and the step's metrics (see `metrics.py`).

    device_seconds: the job's share of the passes that the update was in.
    """

    version: int
    metrics: dict[str, float]
    device_seconds: float = 0.0
