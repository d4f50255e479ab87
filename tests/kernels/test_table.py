"""The segment table, and the reference that reads it."""

import subprocess
import sys

import pytest
import torch

from bench.lora_problems import Adapter, Problem
from marlaas_kernels.reference import multi_lora, segment_lora, segment_lora_backward
from marlaas_kernels.table import SegmentTable

ADAPTERS = [
    Adapter(3, 2, gap=1, scale=0.5, targets=(True, True)),
    Adapter(0, 1, targets=(True, True)),
    Adapter(4, 3, gap=1, scale=2.0, targets=(False, True)),
]


def test_blocks_cover_every_token_of_a_segment_once():
    spans = [(1, 4), (4, 4), (6, 41)]
    table = SegmentTable.of(spans, [1] * 3, [1.0] * 3, [[0]] * 3, [[8]] * 3, [(0, 8)], 16)
    assert table.block_segment_N.tolist() == [0, 2, 2, 2]
    assert table.block_token_N.tolist() == [1, 6, 22, 38]


def test_overlapping_segments_are_refused():
    with pytest.raises(AssertionError, match="overlap"):
        SegmentTable.of([(0, 4), (3, 5)], [1, 1], [1.0, 1.0], [[0], [2]], [[1], [3]], [(0, 8)], 16)


@pytest.mark.parametrize(
    ("rank", "column", "offset", "vector"), [(8, 16, 24, 8), (4, 16, 24, 1), (8, 12, 24, 1), (8, 16, 20, 1)]
)
def test_wide_loads_need_every_address_aligned(rank, column, offset, vector):
    columns = [(0, column), (column, 8)]
    table = SegmentTable.of([(0, 4)], [rank], [1.0], [[-1, offset]], [[-1, 64]], columns, 16)
    assert table.vector == vector
    assert table.moved([[-1, 128]], [[-1, 3]]).vector == 1


def test_the_reference_is_the_definition_token_by_token():
    problem = Problem.random(ADAPTERS, 5, (6, 3), torch.float64, 16, tail=2)
    table, bank = problem.table, problem.bank
    slots = [-1] * len(problem.x_TI)
    for segment in range(table.segments):
        start, end = int(table.start_G[segment]), int(table.end_G[segment])
        slots[start:end] = [segment] * (end - start)
    parts = []
    for part, (_, size) in enumerate(table.columns):
        a, b = [], []
        for segment, rank in enumerate(table.rank_G.tolist()):
            a_at, b_at = int(table.a_offset_GP[segment, part]), int(table.b_offset_GP[segment, part])
            targeted = a_at >= 0
            a.append(bank[a_at : a_at + rank * 5].view(rank, 5) if targeted else bank.new_zeros(rank, 5))
            b.append(bank[b_at : b_at + rank * size].view(size, rank) if targeted else bank.new_zeros(size, rank))
        parts.append(multi_lora(problem.x_TI, a, b, table.scale_G.tolist(), slots))
    torch.testing.assert_close(segment_lora(problem.x_TI, bank, table), torch.cat(parts, dim=1))


def test_the_references_backward_is_the_gradient_of_its_forward():
    problem = Problem.random(ADAPTERS, 4, (5, 3), torch.float64, 16, tail=1)

    class Lora(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, bank):
            ctx.save_for_backward(x, bank)
            return segment_lora(x, bank, problem.table)

        @staticmethod
        def backward(ctx, dy):
            return segment_lora_backward(dy, *ctx.saved_tensors, problem.table)

    assert torch.autograd.gradcheck(Lora.apply, (problem.x_TI.requires_grad_(), problem.bank.requires_grad_()))


def test_triton_is_imported_only_by_its_kernels():
    code = (
        "import sys, marlaas_kernels, marlaas_kernels.reference, marlaas_kernels.segments, marlaas_kernels.table;"
        "import marlaas_kernels.triton.config; print('triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
