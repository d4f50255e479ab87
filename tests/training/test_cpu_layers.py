"""The processor's pieces of a training pass agree with torch's, in value and gradient."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engine import random_batch

from marlaas import cpu_layers
from marlaas.attention import Block, BlockAttention
from marlaas.training.packing import attention_mask, pack_group, stretches
from marlaas.transformer import _rotate

TYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]


def gradients(function, inputs, weight):
    """The value, and the gradient of each input, of the weighted sum of a function's elements."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    (out.float() * weight[: out.numel()].view_as(out)).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def agree(mine, definition, inputs, tolerance):
    """Both on the same inputs; the definition in fp32."""
    weight = torch.randn(200_000, generator=torch.Generator().manual_seed(9))
    got, expected = gradients(mine, inputs, weight), gradients(definition, [x.float() for x in inputs], weight)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance * float(b.abs().max()))


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
def test_norm(dtype, tolerance):
    torch.manual_seed(0)
    x, weight = torch.randn(7, 48).to(dtype), (torch.randn(48) + 1).to(dtype)
    agree(
        lambda x: cpu_layers.rms_norm(x, weight, 1e-5),
        lambda x: F.rms_norm(x, (48,), weight.float(), 1e-5),
        [x],
        tolerance,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
def test_activation(dtype, tolerance):
    torch.manual_seed(0)
    x = (torch.randn(7, 70) * 4).to(dtype)
    agree(cpu_layers.silu_product, lambda x: F.silu(x[:, :35]) * x[:, 35:], [x], tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
def test_rotation_of_the_first_heads(dtype, tolerance):
    torch.manual_seed(0)
    x, angles = torch.randn(5, 6, 16).to(dtype), torch.rand(5, 8) * 6
    wide = torch.cat((angles, angles), dim=1)[:, None]

    def definition(x):
        return torch.cat((_rotate(x[:, :4], wide.cos(), wide.sin()), x[:, 4:]), dim=1)

    agree(lambda x: cpu_layers.rotate_(x.clone(), 4, angles.cos(), angles.sin()), definition, [x], tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 64), (2, 2, 24)])
def test_attention_over_packed_branches_is_that_of_the_mask(tiny, dtype, tolerance, heads, kv_heads, dim):
    rows = []
    for seed in range(3):
        samples = list(enumerate(random_batch(tiny, "a/x", seed, groups=1, members=1 + 4 * seed).samples))
        rows += pack_group(samples, 4096)
    length, start = max(map(len, rows)) + 2, 3
    tokens = start + length * len(rows)
    torch.manual_seed(0)
    q, k, v = (torch.randn(tokens, n, dim).to(dtype) for n in (heads, kv_heads, kv_heads))
    real = torch.zeros(tokens, dtype=torch.bool)
    for i, row in enumerate(rows):
        real[start + i * length :][: len(row)] = True

    def definition(*qkv):
        block = Block(len(rows), length, attention_mask(rows, length, torch.float32, torch.device("cpu")))
        out = BlockAttention([block])(0, *(x[start:] for x in qkv))
        return torch.cat((out.new_zeros(start, out.shape[1]), out)) * real[:, None]

    mine = cpu_layers.BranchAttention(stretches(rows, length, start))
    agree(lambda *qkv: mine(0, *qkv), definition, [q, k, v], tolerance)


def test_attention_of_long_stretches_is_causal(tiny):
    torch.manual_seed(0)
    q, k, v = (torch.randn(75, n, 32) for n in (4, 2, 2))
    mine = cpu_layers.BranchAttention(np.array([[0, 40, 0, 0], [40, 75, 40, 40]]))
    agree(lambda *qkv: mine(0, *qkv), lambda *qkv: plain(*qkv, [40, 35]), [q, k, v], 1e-5)


def plain(q, k, v, sizes):
    parts = zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
    return torch.cat(
        [
            F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in qkv), is_causal=True, enable_gqa=True)[0]
            .transpose(0, 1)
            .flatten(1)
            for qkv in parts
        ]
    )


def test_what_is_not_a_number_stays_in_its_own_stretch():
    q, k, v = (torch.randn(8, 2, 16) for _ in range(3))
    q[5] = torch.nan
    out = cpu_layers.BranchAttention(np.array([[0, 4, 0, 0], [4, 8, 4, 4]]))(0, q, k, v)
    assert out[:4].isfinite().all()
    assert out[5].isnan().all()


def test_the_first_branch_of_a_row_is_a_row_of_its_first_sample(tiny):
    samples = list(enumerate(random_batch(tiny, "a/x", 1, groups=1, members=3).samples))
    (row,), (alone,) = pack_group(samples, 4096), pack_group(samples[:1], 4096)
    first = row.first_branch
    assert first.tokens.tolist() == samples[0][1].tokens.tolist() == alone.tokens.tolist()
    assert first.positions.tolist() == alone.positions.tolist()
    assert first.predicts.tolist() == [int(i) - 1 for i in first.place]
    assert first.targets.tolist() == alone.targets.tolist()
    assert set(first.sample.tolist()) == {0}
