"""The segment table, and the reference that reads it."""

import subprocess
import sys

import pytest
import torch

from bench.lora_problems import Adapter, Problem
from marlaas_kernels.reference import multi_lora, segment_lora, segment_lora_backward
from marlaas_kernels.table import Segments, SegmentTable

ADAPTERS = [
    Adapter(3, 2, gap=1, scale=0.5, targets=(True, True)),
    Adapter(0, 1, targets=(True, True)),
    Adapter(4, 3, gap=1, scale=2.0, targets=(False, True)),
]


def test_blocks_cover_every_token_of_a_segment_once():
    segments = Segments.of([(1, 4), (4, 4), (6, 41)], [1, 2, 3], [1.0] * 3, 16)
    assert segments.block_segment_N.tolist() == [0, 2, 2, 2]
    assert segments.block_token_N.tolist() == [1, 6, 22, 38]
    assert (segments.start_G.tolist(), segments.end_G.tolist()) == ([1, 4, 6], [4, 4, 41])
    assert segments.rank_G.tolist() == [1, 2, 3]


def test_overlapping_segments_are_refused():
    with pytest.raises(AssertionError, match="overlap"):
        Segments.of([(0, 4), (3, 5)], [1, 1], [1.0, 1.0], 16)


@pytest.mark.parametrize(
    ("rank", "column", "offset", "vector"), [(8, 16, 24, 8), (3, 16, 24, 8), (8, 12, 24, 1), (8, 16, 20, 1)]
)
def test_wide_loads_need_every_address_aligned(rank, column, offset, vector):
    segments, columns = Segments.of([(0, 4)], [rank], [1.0], 16), [(0, column), (column, 8)]
    assert SegmentTable.of(segments, [[-1, offset]], [[-1, 64]], columns).vector == vector
    assert SegmentTable.of(segments, [[-1, 128]], [[-1, 3]], columns).vector == 1


def test_tables_of_all_layers_are_those_of_each():
    segments, columns = Segments.of([(0, 4), (4, 6)], [2, 3], [1.0, 1.0], 16), [(0, 16), (16, 8)]
    offsets_2LGP = torch.arange(2 * 3 * 2 * 2).view(2, 3, 2, 2) * 8
    offsets_2LGP[:, 1, 0] = -1
    tables = SegmentTable.of_layers(segments, offsets_2LGP, columns)
    assert len(tables) == 3
    for table, a_GP, b_GP in zip(tables, *offsets_2LGP, strict=True):
        alone = SegmentTable.of(segments, a_GP.tolist(), b_GP.tolist(), columns)
        assert torch.equal(table.a_offset_GP, alone.a_offset_GP)
        assert torch.equal(table.b_offset_GP, alone.b_offset_GP)
        assert (table.vector, table.distinct, table.outputs) == (8, True, 24)


def test_one_adapter_in_two_segments_has_no_distinct_places():
    segments = Segments.of([(0, 4), (4, 6)], [2, 2], [1.0, 1.0], 16)
    assert not SegmentTable.of(segments, [[0], [0]], [[32], [32]], [(0, 8)]).distinct


def test_the_reference_is_the_definition_token_by_token():
    problem = Problem.random(ADAPTERS, 5, (6, 3), torch.float64, 16, tail=2)
    table, bank = problem.table, problem.bank
    slots = [-1] * len(problem.x_TI)
    bounds = zip(table.segments.start_G.tolist(), table.segments.end_G.tolist(), strict=True)
    for segment, (start, end) in enumerate(bounds):
        slots[start:end] = [segment] * (end - start)
    parts = []
    for part, (_, size) in enumerate(table.columns):
        a, b = [], []
        for segment, rank in enumerate(table.segments.rank_G.tolist()):
            a_at, b_at = int(table.a_offset_GP[segment, part]), int(table.b_offset_GP[segment, part])
            targeted = a_at >= 0
            a.append(bank[a_at : a_at + rank * 5].view(rank, 5) if targeted else bank.new_zeros(rank, 5))
            b.append(bank[b_at : b_at + rank * size].view(rank, size).T if targeted else bank.new_zeros(size, rank))
        parts.append(multi_lora(problem.x_TI, a, b, table.segments.scale_G.tolist(), slots))
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
