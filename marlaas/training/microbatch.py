"""A micro-batch: rows of many jobs in one flat token batch, each job's rows one contiguous block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from marlaas.attention import Block, BlockAttention
from marlaas.cpu_kernels import runs_here
from marlaas.cpu_layers import BranchAttention
from marlaas.training.batch import TrainingSample
from marlaas.training.logprobs import Targets
from marlaas.training.packing import Row, attention_mask, stretches
from marlaas.transformer import Attention


@dataclass(frozen=True)
class JobRows:
    """Some packed rows of one job, and the samples that they point into."""

    job: str
    rows: Sequence[Row]
    samples: Sequence[TrainingSample]

    @property
    def length(self) -> int:
        return max(len(row) for row in self.rows)

    @property
    def padded_tokens(self) -> int:
        return len(self.rows) * self.length

    @property
    def sampled_tokens(self) -> int:
        return sum(len(row.targets) for row in self.rows)


@dataclass(frozen=True)
class MicroBatch:
    """Inputs of one pass. token_spans and target_spans: each job's slice of the T tokens and the N targets."""

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    attend: Attention
    predicts_N: torch.Tensor
    targets: Targets
    behaviour_N: torch.Tensor
    sample_N: np.ndarray
    token_spans: Sequence[tuple[int, int]]
    target_spans: Sequence[tuple[int, int]]


def build(parts: Sequence[JobRows], dtype: torch.dtype, device: torch.device) -> MicroBatch:
    """Pads each job's rows to that job's longest and lays all out in one batch."""
    tokens, positions, predicts, targets, sample_of = [], [], [], [], []
    token_spans, target_spans, drawn = [], [], []
    start, target_start = 0, 0
    for part in parts:
        length = part.length
        for r, row in enumerate(part.rows):
            padding = (0, length - len(row))
            tokens.append(np.pad(row.tokens, padding))
            positions.append(np.pad(row.positions, padding))
            predicts.append(row.predicts + start + r * length)
            targets.append(row.targets)
            sample_of.append(row.sample)
            drawn += [
                (s.logprobs[p], s.temperature, s.top_p, s.top_k)
                for s, p in zip((part.samples[i] for i in row.sample), row.place, strict=True)
            ]
        token_spans.append((start, start + part.padded_tokens))
        target_spans.append((target_start, target_start + part.sampled_tokens))
        start, target_start = token_spans[-1][1], target_spans[-1][1]
    behaviour, temperature, top_p, top_k = (np.array(column) for column in zip(*drawn, strict=True))

    def on_device(array: np.ndarray, kind: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(array, dtype=kind, device=device)

    return MicroBatch(
        tokens_T=on_device(np.concatenate(tokens), torch.long),
        positions_T=on_device(np.concatenate(positions), torch.long),
        attend=_attention(parts, [start for start, _ in token_spans], dtype, device),
        predicts_N=on_device(np.concatenate(predicts), torch.long),
        targets=Targets(
            on_device(np.concatenate(targets), torch.long),
            on_device(temperature, torch.float32),
            on_device(top_k, torch.long),
            on_device(top_p, torch.float32),
        ),
        behaviour_N=on_device(behaviour, torch.float32),
        sample_N=np.concatenate(sample_of),
        token_spans=token_spans,
        target_spans=target_spans,
    )


def _attention(parts: Sequence[JobRows], starts: Sequence[int], dtype: torch.dtype, device: torch.device) -> Attention:
    if runs_here(device, dtype):
        found = [stretches(part.rows, part.length, start) for part, start in zip(parts, starts, strict=True)]
        return BranchAttention(np.concatenate(found))
    masks = [attention_mask(part.rows, part.length, dtype, device) for part in parts]
    return BlockAttention([Block(len(p.rows), p.length, mask) for p, mask in zip(parts, masks, strict=True)])
