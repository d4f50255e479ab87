"""The processor's kernels agree with their definitions, with torch's operations and with the torch decoder."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numba import njit

from marlaas_kernels.cpu import attention, lora, primitives, tiles
from marlaas_kernels.reference import multi_lora

TYPES = [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)]


def as_array(tensor):
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def test_bfloat16_is_read_and_rounded_as_torch_does():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, generator=generator) * torch.logspace(-38, 38, 4096)
    x[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    rounded = np.array([round_trip(v) for v in x.numpy()], dtype=np.float32)
    torch.testing.assert_close(torch.from_numpy(rounded), x.bfloat16().float(), rtol=0, atol=0, equal_nan=True)


@primitives.njit(**primitives.FAST)
def round_trip(value):
    like = np.empty(0, dtype=np.uint16)
    return primitives.as_float(primitives.from_float(value, like))


def test_the_exponential_is_within_fp32_rounding():
    x = np.linspace(-100, 0, 20001, dtype=np.float32)
    got = np.array([primitives.exponential(v) for v in x])
    expected = np.exp(x.astype(np.float64))
    inside = x >= -87
    assert np.abs(got[inside] / expected[inside] - 1).max() < 3e-7
    assert (got[~inside] == 0).all()


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 9])
def test_products_of_a_few_rows(dtype, tolerance, tokens):
    generator = torch.Generator().manual_seed(tokens)
    for outputs, inputs in ((7, 33), (64, 96)):
        w = torch.randn(outputs, inputs, generator=generator).to(dtype)
        x = torch.randn(tokens, inputs, generator=generator)
        y = torch.randn(tokens, outputs + 3, generator=generator)
        expected = y.clone()
        expected[1:, 2 : 2 + outputs] += x[1:] @ w.float().T
        tiles.add_product(as_array(w), x.numpy(), y.numpy(), 1, tokens, 2)
        torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)


@njit
def product_of_factor(w_OI, x_NI, y_NO):
    tiles.add_product(w_OI, tiles.factor(x_NI, w_OI), y_NO, 0, len(x_NI), 0)


@pytest.mark.parametrize(
    ("dtype", "x_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7])
def test_products_of_factors_sum_the_rounded_elements_exactly(dtype, x_dtype, tokens):
    generator = torch.Generator().manual_seed(tokens)
    for outputs, inputs in ((7, 33), (4, 32), (64, 96), (12, 130)):
        w = torch.randn(outputs, inputs, generator=generator).to(dtype)
        x = torch.randn(tokens, inputs, generator=generator).to(x_dtype)
        y = torch.randn(tokens, outputs, generator=generator)
        rounded = x.to(dtype) if tiles.PAIRS else x
        expected = y + (rounded.double() @ w.double().T).float()
        product_of_factor(as_array(w), as_array(x), y.numpy())
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("seed", range(6))
def test_lora_adds_each_tokens_own_delta(dtype, tolerance, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs, columns = 40, [(0, 24), (24, 8), (32, 8)]
    ranks = [(1, 8, 16), (3, 5, 64), (4, 4, 4), (128, 2, 7), (8, 8, 1), (6, 12, 24)][seed]
    sizes = torch.randint(0, 6, (len(ranks),), generator=generator).tolist()
    x = torch.randn(sum(sizes) + 3, inputs, generator=generator)
    targeted = [[0, 1, 2], [0, 2], []]  # of each adapter in turn; the last has none of this linear's parts
    segments, sites, keep, at = [], np.full((len(ranks), lora.SITE), -1, dtype=np.int64), [], 1
    a, b = [], []  # the definition takes one part at a time
    for g, (rank, size) in enumerate(zip(ranks, sizes, strict=True)):
        parts = targeted[g % 3]
        vector = torch.randn(5 + rank * sum(inputs + columns[p][1] for p in parts), generator=generator).to(dtype)
        keep.append(vector)
        segments.append((at, at + size, vector.data_ptr(), rank, g))
        if parts:
            sites[g, : 2 + 2 * len(parts)] = [5, len(parts), *(n for p in parts for n in columns[p])]
        a.append({p: vector[5 + i * rank * inputs :][: rank * inputs].view(rank, inputs) for i, p in enumerate(parts)})
        rest = vector[5 + len(parts) * rank * inputs :].split([rank * columns[p][1] for p in parts])
        b.append({p: v.view(rank, columns[p][1]).T for p, v in zip(parts, rest, strict=True)})
        at += size
    scale = np.linspace(0.5, 2, len(ranks)).astype(np.float32)
    slot = [next((g for g, s in enumerate(segments) if s[0] <= t < s[1]), -1) for t in range(len(x))]
    y = torch.randn(len(x), 40, generator=generator)
    expected = y.double()
    for p, (start, size) in enumerate(columns):
        of_part = [s if s >= 0 and p in a[s] else -1 for s in slot]
        a_p = [m.get(p, torch.zeros(1, inputs)).double() for m in a]
        b_p = [m.get(p, torch.zeros(size, 1)).double() for m in b]
        expected[:, start : start + size] += multi_lora(x.double(), a_p, b_p, scale.tolist(), of_part)
    work = np.empty((len(x), 3 * max(ranks)), dtype=np.float32)
    base = y.clone()
    like = as_array(keep[0][:0])
    lora.add_lora(x.numpy(), y.numpy(), work, np.array(segments, dtype=np.int64), scale, sites, like)
    torch.testing.assert_close(y, expected.float(), rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    without = torch.tensor([s < 0 for s in slot])
    assert (y[without] == base[without]).all(), "tokens without an adapter are not touched"


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "length"), [(4, 2, 1), (3, 1, 5), (2, 2, 67)])
def test_attention_of_one_token(dtype, tolerance, heads, kv_heads, length):
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(heads, 16, generator=generator) * 3
    keys, values = (torch.randn(kv_heads, 70, 16, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(heads, 16)
    attention.attend(query.numpy(), as_array(keys), as_array(values), length, out.numpy())
    expected = F.scaled_dot_product_attention(
        query[None, :, None], keys[None, :, :length].float(), values[None, :, :length].float(), enable_gqa=True
    )
    torch.testing.assert_close(out, expected[0, :, 0], rtol=tolerance, atol=tolerance)


def test_what_is_not_a_number_stays_in_its_own_rows():
    x, y = torch.ones(4, 8), torch.zeros(4, 8)
    x[1] = torch.nan
    tiles.add_product(torch.ones(8, 8).numpy(), x.numpy(), y.numpy(), 0, 4, 0)
    assert y[1].isnan().all()
    assert (y[[0, 2, 3]] == 8).all()
