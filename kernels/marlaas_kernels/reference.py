"""The definitions: what each kernel computes, written to be read. Tests hold every fast path to these."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from marlaas_kernels.table import SegmentTable


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


def segment_lora(x_TI: torch.Tensor, bank: torch.Tensor, table: SegmentTable) -> torch.Tensor:
    """Each token's LoRA delta `[T, outputs]` at one fused linear, in x's dtype; 0 for tokens of no segment.

    bank: any shape, read flat, each B transposed; delta = scale * B (A x) in the columns of each part that the adapter
    targets.
    """
    delta_TO = x_TI.new_zeros(x_TI.shape[0], table.outputs)
    for segment in range(table.segments.count):
        tokens, scale = _segment(table, segment)
        for part, (column, size) in enumerate(table.columns):
            if table.a_offset_GP[segment, part] >= 0:
                a_RI, b_OR = _matrices(bank, table, segment, part, x_TI.shape[1])
                delta_TO[tokens, column : column + size] = scale * (x_TI[tokens] @ a_RI.T @ b_OR.T)
    return delta_TO


def segment_lora_backward(
    dy_TO: torch.Tensor, x_TI: torch.Tensor, bank: torch.Tensor, table: SegmentTable
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `segment_lora` with respect to x, `[T, I]`, and to the bank, in the bank's shape.

    With h = scale * A x and y = B h: dB = dy^T h, dh = scale * dy B, dA = dh^T x, dx = dh A.
    """
    dx_TI, dbank = torch.zeros_like(x_TI), torch.zeros_like(bank)
    for segment in range(table.segments.count):
        tokens, scale = _segment(table, segment)
        for part, (column, size) in enumerate(table.columns):
            if table.a_offset_GP[segment, part] >= 0:
                a_RI, b_OR = _matrices(bank, table, segment, part, x_TI.shape[1])
                da_RI, db_OR = _matrices(dbank, table, segment, part, x_TI.shape[1])
                dy_part = dy_TO[tokens, column : column + size]
                dh_TR = scale * (dy_part @ b_OR)
                db_OR += scale * (dy_part.T @ (x_TI[tokens] @ a_RI.T))
                da_RI += dh_TR.T @ x_TI[tokens]
                dx_TI[tokens] += dh_TR @ a_RI
    return dx_TI, dbank


def cold_scores(expert_V: torch.Tensor, amateur_V: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
    """CoLD scores of one position, from raw logits `[V]`; -inf where the alpha mask drops a token.

    keep(j) = e_j >= max e + log(alpha); score(j) = (1 + beta) e_j - beta a_j. O'Brien and Lewis 2023.
    Needs 0 < alpha <= 1 and beta >= 0. Raw logits do: log-softmax shifts a row by a constant.
    """
    keep = expert_V >= expert_V.max() + math.log(alpha)
    scores = (1 + beta) * expert_V - beta * amateur_V
    return torch.where(keep, scores, torch.full_like(scores, -torch.inf))


def _segment(table: SegmentTable, segment: int) -> tuple[slice, float]:
    """The segment's tokens and its adapter's scale."""
    s = table.segments
    return slice(int(s.start_G[segment]), int(s.end_G[segment])), float(s.scale_G[segment])


def _matrices(
    bank: torch.Tensor, table: SegmentTable, segment: int, part: int, inputs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of one segment's A `[rank, inputs]` and B `[size, rank]` of one part; B lies transposed."""
    flat, rank, size = bank.view(-1), int(table.segments.rank_G[segment]), table.columns[part][1]
    a_offset, b_offset = int(table.a_offset_GP[segment, part]), int(table.b_offset_GP[segment, part])
    a_RI = flat[a_offset : a_offset + rank * inputs].view(rank, inputs)
    return a_RI, flat[b_offset : b_offset + rank * size].view(rank, size).T
