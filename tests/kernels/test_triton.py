"""The Triton kernels, run by Triton's interpreter on a CPU, agree with the reference on random ragged batches."""

import interpreter  # noqa: F401
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.lora_problems import TOLERANCE, Adapter, Problem
from marlaas_kernels.table import SegmentTable
from marlaas_kernels.triton.config import Shape, Tiles, tiles_of
from marlaas_kernels.triton.forward import shrink
from marlaas_kernels.triton.op import segment_lora_, segment_lora_backward

pytestmark = pytest.mark.usefixtures("interpreted")

RANKS = st.one_of(st.integers(1, 128), st.sampled_from([1, 8, 16, 17, 64, 128]))
DTYPES = st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16])


@st.composite
def problems(draw, shape):
    """Up to four adapters, some without tokens, of mixed ranks and targets, with tokens of the base between them."""
    parts = draw(st.integers(1, 3))
    longest = 20 if shape is Shape.DECODE else 70
    adapter = st.builds(
        Adapter,
        tokens=st.one_of(st.just(0), st.integers(1, 3), st.integers(1, longest)),
        rank=RANKS,
        gap=st.integers(0, 2),
        scale=st.sampled_from([0.25, 1.0, 2.0]),
        targets=st.tuples(*[st.booleans()] * parts),
    )
    return Problem.random(
        draw(st.lists(adapter, max_size=4)),
        inputs=draw(st.one_of(st.integers(1, 60), st.sampled_from([16, 32, 64]))),
        sizes=draw(st.lists(st.one_of(st.integers(1, 40), st.just(32)), min_size=parts, max_size=parts)),
        dtype=draw(DTYPES),
        block_tokens=tiles_of("cpu", shape).tokens,
        tail=draw(st.integers(1, 3)),
        padding=draw(st.sampled_from([0, 1, 8])),
        seed=draw(st.integers(0, 2**31)),
    )


@pytest.mark.parametrize("shape", Shape)
@given(data=st.data())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_forward_and_backward_are_the_reference_within_the_dtypes_rounding(shape, data):
    problem = data.draw(problems(shape))
    errors = problem.errors(tiles_of("cpu", shape))
    assert max(errors.values()) <= TOLERANCE[problem.x_TI.dtype], errors


@pytest.mark.parametrize("device_type", ["cuda", "npu"])
@pytest.mark.parametrize("shape", Shape)
def test_the_tiles_of_devices_compute_the_same(device_type, shape):
    tiles = tiles_of(device_type, shape)
    adapters = [
        Adapter(tokens=5, rank=8, targets=(True, True)),
        Adapter(tokens=tiles.tokens + 3, rank=128, gap=1, targets=(False, True)),
        Adapter(tokens=1, rank=24, targets=(True, False)),
    ]
    problem = Problem.random(adapters, 1100, (264, 40), torch.float32, tiles.tokens, tail=1)
    errors = problem.errors(tiles)
    assert max(errors.values()) <= TOLERANCE[torch.float32], errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_without_adapter_and_parts_that_are_not_targeted_stay_as_they_are(dtype):
    tiles = tiles_of("cpu", Shape.LONG)
    adapters = [Adapter(3, 2, gap=2, targets=(True, False)), Adapter(40, 16, gap=1, targets=(False, False))]
    problem = Problem.random(adapters, 20, (24, 9), dtype, tiles.tokens, tail=2)
    y, gradients = problem.y_TO.clone(), problem.gradients.clone()
    h_STC = segment_lora_(y, problem.x_TI, problem.bank, problem.table)
    dx = segment_lora_backward(
        problem.dy_TO, problem.x_TI, h_STC, problem.bank, problem.table, gradients, problem.gradient_table
    )
    changed = y != problem.y_TO
    assert changed[2:5, :24].any(dim=1).all()
    changed[2:5, :24] = False
    assert not changed.any()
    assert (dx[2:5] != 0).any(dim=1).all()
    dx[2:5] = 0
    assert (dx == 0).all()


@pytest.mark.parametrize("adapters", [[], [Adapter(0, 8)], [Adapter(4, 8, targets=(False,))]])
def test_a_batch_that_no_adapter_touches_is_left_alone(adapters):
    tiles = tiles_of("cpu", Shape.DECODE)
    problem = Problem.random(adapters, 10, (12,), torch.float32, tiles.tokens, tail=3)
    assert problem.errors(tiles) == {"y": 0.0, "dx": 0.0, "gradients": 0.0}


def test_gradients_beside_those_of_the_table_are_not_touched():
    tiles = tiles_of("cpu", Shape.LONG)
    adapters = [Adapter(3, 3, targets=(True,)), Adapter(2, 5, targets=(True,))]
    problem = Problem.random(adapters, 7, (11,), torch.float32, tiles.tokens, padding=6)
    gradients = problem.gradients.clone()
    h_STC = segment_lora_(problem.y_TO.clone(), problem.x_TI, problem.bank, problem.table)
    args = (problem.dy_TO, problem.x_TI, h_STC, problem.bank, problem.table, gradients, problem.gradient_table)
    segment_lora_backward(*args)
    ours = torch.zeros_like(gradients, dtype=torch.bool)
    for offset, elements in ((12, 3 * (7 + 11)), (12 + 54 + 12, 5 * (7 + 11))):
        ours[offset : offset + elements] = True
    assert torch.equal(gradients != problem.gradients, ours)


@pytest.mark.parametrize("shape", Shape)
def test_an_adapter_that_is_not_a_number_leaves_the_others_alone(shape):
    tiles = tiles_of("cpu", shape)
    adapters = [
        Adapter(3, 4, targets=(True, True)),
        Adapter(6, 20, gap=1, targets=(True, True)),
        Adapter(2, 8, targets=(True, True)),
    ]
    clean = Problem.random(adapters, 20, (12, 6), torch.float32, tiles.tokens)
    results = []
    for problem in (clean, clean.poisoned(1)):
        y, gradients = problem.y_TO.clone(), problem.gradients.clone()
        h_STC = segment_lora_(y, problem.x_TI, problem.bank, problem.table)
        dx = segment_lora_backward(
            problem.dy_TO, problem.x_TI, h_STC, problem.bank, problem.table, gradients, problem.gradient_table
        )
        results.append((y, dx, gradients))
    (y, dx, gradients), (poisoned_y, poisoned_dx, poisoned_gradients) = results
    others = [t for t in range(len(y)) if not 4 <= t < 10]
    assert torch.equal(poisoned_y[others], y[others])
    assert torch.equal(poisoned_dx[others], dx[others])
    assert poisoned_y[4:10].isnan().all()
    first, last = 4 * (2 * 20 + 18), 8 * (2 * 20 + 18)
    assert torch.equal(poisoned_gradients[:first], gradients[:first])
    assert torch.equal(poisoned_gradients[-last:], gradients[-last:])


def test_the_inputs_of_a_decode_step_are_split_among_programs():
    tiles = tiles_of("cpu", Shape.DECODE)
    problem = Problem.random([Adapter(2, 4)], 50, (8,), torch.float32, tiles.tokens)
    h_STC = shrink(problem.x_TI, problem.bank, problem.table, tiles)
    assert h_STC.shape == (3, 2, 4)
    a_RI = problem.bank[: 4 * 50].view(4, 50)
    torch.testing.assert_close(h_STC[0], problem.x_TI[:, :32] @ a_RI[:, :32].T)
    torch.testing.assert_close(h_STC.sum(0), problem.x_TI @ a_RI.T)


def test_two_segments_of_one_adapter_cannot_train_together():
    tiles = tiles_of("cpu", Shape.DECODE)
    problem = Problem.random([Adapter(2, 4), Adapter(2, 4)], 8, (8,), torch.float32, tiles.tokens)
    shared = SegmentTable.of(problem.table.segments, [[0], [0]], [[32], [32]], problem.table.columns)
    h_STC = segment_lora_(problem.y_TO, problem.x_TI, problem.bank, problem.table)
    args = (problem.dy_TO, problem.x_TI, h_STC, problem.bank, problem.table, problem.gradients)
    with pytest.raises(AssertionError, match="same gradients"):
        segment_lora_backward(*args, shared)


def test_a_launch_beyond_the_devices_limit_is_refused():
    problem = Problem.random([Adapter(40, 4)], 8, (8,), torch.float32, 16)
    with pytest.raises(ValueError, match="too many tokens"):
        segment_lora_(problem.y_TO, problem.x_TI, problem.bank, problem.table, Tiles(16, 16, 16, 16, max_programs=2))


def test_a_device_without_tiles_is_refused():
    with pytest.raises(ValueError, match="'xpu'; known are cpu, cuda, npu"):
        tiles_of("xpu", Shape.DECODE)
