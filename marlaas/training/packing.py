"""Samples into training rows: a group's shared prompt runs once, its completions branch off it.

A row is `[prefix | branch 1 | branch 2 | ...]`. A branch token attends to the prefix and to its own branch, at
the positions it had in its sample, so hidden states and gradients are those of the samples run one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from marlaas.training.batch import TrainingSample


@dataclass(frozen=True)
class Row:
    """One packed row; all arrays are of its length but those of the N sampled tokens.

    branch: 0 for the prefix, then 1, 2, ... predicts: for each sampled token the index, in the row, of the token
    whose hidden state predicts it. sample: which of the batch's samples it belongs to; place: its index in there.
    """

    tokens: np.ndarray
    positions: np.ndarray
    branch: np.ndarray
    predicts: np.ndarray
    targets: np.ndarray
    sample: np.ndarray
    place: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def first_branch(self) -> Row:
        """The prefix and its first branch alone."""
        tokens, targets = self.branch <= 1, self.sample == self.sample[0]
        row = (self.tokens, self.positions, self.branch), (self.predicts, self.targets, self.sample, self.place)
        return Row(*(array[tokens] for array in row[0]), *(array[targets] for array in row[1]))


def pack_group(samples: Sequence[tuple[int, TrainingSample]], longest: int, pair_cost: float = 0.0) -> Iterator[Row]:
    """Packs one group's (index, sample) pairs into rows of at most `longest` tokens, in their order.

    A single sample must fit by itself. pair_cost: of a (query, key) pair of attention, in terms of one token's other
    work. Branches that share a prefix of P tokens save P tokens each, and cost attention to one another that is
    masked out; a token costs least, (L + pair_cost L^2) / (L - P), in rows of L = P + sqrt(P / pair_cost + P^2) tokens.
    """
    prefix = _shared_prefix([s for _, s in samples])
    if pair_cost > 0:
        longest = min(longest, prefix + math.ceil(math.sqrt(prefix / pair_cost + prefix**2)))
    chosen: list[tuple[int, TrainingSample]] = []
    length = prefix
    for index, sample in samples:
        own = len(sample.tokens) - prefix
        if chosen and length + own > longest:
            yield _row(chosen, prefix)
            chosen, length = [], prefix
        chosen.append((index, sample))
        length += own
    yield _row(chosen, prefix)


def _shared_prefix(samples: Sequence[TrainingSample]) -> int:
    """Tokens that all samples start with and that none of them sampled."""
    first = samples[0].tokens
    shared = min(int(np.argmax(s.mask)) for s in samples)
    for sample in samples[1:]:
        differs = np.nonzero(first[:shared] != sample.tokens[:shared])[0]
        shared = int(differs[0]) if len(differs) else shared
    return shared


def _row(samples: Sequence[tuple[int, TrainingSample]], prefix: int) -> Row:
    tokens, positions = [samples[0][1].tokens[:prefix]], [np.arange(prefix)]
    branches = [np.zeros(prefix, dtype=np.int64)]
    predicts, targets, sample_ids, places = [], [], [], []
    start = prefix
    for branch, (index, sample) in enumerate(samples, 1):
        own = len(sample.tokens) - prefix
        place = np.nonzero(sample.mask)[0]
        at = start + place - prefix - 1
        # The branch's first token is predicted by the last token of the prefix.
        predicts.append(np.where(place == prefix, prefix - 1, at))
        targets.append(sample.tokens[place])
        sample_ids.append(np.full(len(place), index))
        places.append(place)
        tokens.append(sample.tokens[prefix:])
        positions.append(np.arange(prefix, prefix + own))
        branches.append(np.full(own, branch))
        start += own
    rows = (tokens, positions, branches, predicts, targets, sample_ids, places)
    return Row(*(np.concatenate(r).astype(np.int64) for r in rows))


def stretches(rows: Sequence[Row], length: int, start: int) -> np.ndarray:
    """What `attention_mask` says, for tokens that begin at `start` of a flat batch: int64 `[S, 4]`.

    A branch each: its begin and end, and begin and end of the prefix that it sees; the prefix sees itself.
    """
    found = []
    for index, row in enumerate(rows):
        begin = start + index * length
        ends = begin + np.flatnonzero(np.diff(row.branch, append=-1)) + 1
        prefix_end = int(ends[0]) if row.branch[0] == 0 else begin
        for first, end in pairwise([begin, *map(int, ends)]):
            found.append((first, end, begin, begin if first == begin else prefix_end))
    return np.array(found, dtype=np.int64)


def attention_mask(rows: Sequence[Row], length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """Additive mask `[rows, 1, length, length]` of right-padded rows: causal, inside the prefix and one's branch.

    None, which is plain causal, where every row has one branch.
    """
    if all(row.branch[-1] == 1 for row in rows):
        return None
    branch = np.full((len(rows), length), -1)
    for i, row in enumerate(rows):
        branch[i, : len(row)] = row.branch
    branch_RL = torch.as_tensor(branch, device=device)
    key, query = branch_RL[:, None, :], branch_RL[:, :, None]
    order = torch.arange(length, device=device)
    allowed = ((key == 0) | (key == query)) & (order[None, :] <= order[:, None])
    mask = torch.zeros(allowed.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~allowed, -torch.inf)[:, None]
