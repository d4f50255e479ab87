"""The fast multi-LoRA and CoLD paths agree with their definitions on random inputs."""

import pytest
import torch

from marlaas.sampling.cold import cold_logits
from marlaas_kernels.reference import cold_scores, multi_lora
from marlaas_kernels.segments import (
    SegmentWeights,
    StackedTokens,
    multi_lora_,
    multi_lora_backward,
    stacked_lora_,
)

COLUMNS = [(0, 6), (6, 3)]  # two parts of a fused linear with nine outputs


def random_segments(generator, inputs=5):
    """Adapters of ranks 2, 4 and 1, with a gap of base tokens between the first two."""
    segments = []
    for start, end, rank in ((0, 3, 2), (5, 9, 4), (9, 10, 1)):
        a = torch.randn(2 * rank, inputs, generator=generator, dtype=torch.float64)
        b = [torch.randn(size, rank, generator=generator, dtype=torch.float64) for _, size in COLUMNS]
        segments.append(SegmentWeights(start, end, 0.5 * rank, a, b, COLUMNS))
    return segments


def reference_delta(x, segments):
    """The definition, part by part, put side by side."""
    slots = [next((i for i, s in enumerate(segments) if s.start <= t < s.end), -1) for t in range(len(x))]
    parts = []
    for part in range(len(COLUMNS)):
        a = [s.a[part * s.rank : (part + 1) * s.rank] for s in segments]
        parts.append(multi_lora(x, a, [s.b[part] for s in segments], [s.scale for s in segments], slots))
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("seed", range(3))
def test_segments_add_each_tokens_own_delta(seed):
    generator = torch.Generator().manual_seed(seed)
    segments, x = random_segments(generator), torch.randn(12, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(12, 9, generator=generator, dtype=torch.float64)
    expected = y + reference_delta(x, segments)
    multi_lora_(y, x, segments)
    torch.testing.assert_close(y, expected)
    assert (reference_delta(x, segments)[[3, 4, 10, 11]] == 0).all(), "tokens of no segment get the base alone"


@pytest.mark.parametrize("seed", range(3))
def test_a_stack_of_short_segments_adds_each_tokens_own_delta(seed):
    generator = torch.Generator().manual_seed(seed)
    spans, rank, tokens = [(0, 1), (1, 4), (6, 8), (9, 10)], 3, 12  # with tokens of the base between and after
    a_GRI = torch.randn(4, 2 * rank, 5, generator=generator, dtype=torch.float64)
    b_GOR = [torch.randn(4, size, rank, generator=generator, dtype=torch.float64) for _, size in COLUMNS]
    x = torch.randn(tokens, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(tokens, 9, generator=generator, dtype=torch.float64)
    segments = [
        SegmentWeights(start, end, 0.7, a_GRI[g], [b[g] for b in b_GOR], COLUMNS)
        for g, (start, end) in enumerate(spans)
    ]
    expected = y + reference_delta(x, segments)
    stacked_lora_(y, x, StackedTokens.of(spans, x.device), 0.7, a_GRI, b_GOR, COLUMNS)
    torch.testing.assert_close(y, expected)


def test_a_stacked_segment_that_is_not_a_number_leaves_the_others_alone():
    x, y = torch.ones(6, 5), torch.zeros(6, 9)
    a_GRI, b_GOR = torch.ones(3, 4, 5), [torch.ones(3, size, 2) for _, size in COLUMNS]
    a_GRI[1] = torch.nan
    stacked_lora_(y, x, StackedTokens.of([(0, 1), (1, 4), (4, 6)], x.device), 1.0, a_GRI, b_GOR, COLUMNS)
    assert y[[0, 4, 5]].isfinite().all()
    assert y[1:4].isnan().all()


def test_backward_is_the_gradient_of_the_definition():
    generator = torch.Generator().manual_seed(0)
    segments = random_segments(generator)
    x = torch.randn(12, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(12, 9, generator=generator, dtype=torch.float64)
    leaves = [t.requires_grad_() for s in segments for t in (s.a, *s.b)]
    reference_delta(x, segments).backward(dy)
    buffers = [(torch.zeros_like(s.a), [torch.zeros_like(b) for b in s.b]) for s in segments]
    with torch.no_grad():
        shrunk = multi_lora_(torch.zeros(12, 9, dtype=torch.float64), x, segments)
        dx = multi_lora_backward(dy, x, shrunk, segments, buffers)
    torch.testing.assert_close(dx, x.grad)
    for leaf, gradient in zip(leaves, (t for a, b in buffers for t in (a, *b)), strict=True):
        torch.testing.assert_close(gradient, leaf.grad)


def test_a_segment_that_is_not_a_number_leaves_the_others_alone():
    generator = torch.Generator().manual_seed(0)
    segments, x = random_segments(generator), torch.randn(12, 5, generator=generator, dtype=torch.float64)
    clean = torch.zeros(12, 9, dtype=torch.float64)
    multi_lora_(clean, x, segments)
    segments[1].a.fill_(torch.nan)
    x[5:9] = torch.inf
    poisoned = torch.zeros(12, 9, dtype=torch.float64)
    multi_lora_(poisoned, x, segments)
    others = [t for t in range(12) if not 5 <= t < 9]
    assert torch.equal(poisoned[others], clean[others])
    assert poisoned[5:9].isnan().all()


def test_batched_cold_scores_are_the_definition_row_by_row():
    generator = torch.Generator().manual_seed(0)
    expert, amateur = (torch.randn(6, 50, generator=generator) * 4 for _ in range(2))
    alpha = torch.tensor([0.1, 1.0, 0.01, 0.5, 1e-6, 0.1])
    beta = torch.tensor([0.5, 0.5, 2.0, 0.0, 10.0, 1.0])
    scores = cold_logits(expert, amateur, alpha, beta)
    for row in range(6):
        expected = cold_scores(expert[row], amateur[row], float(alpha[row]), float(beta[row]))
        torch.testing.assert_close(scores[row], expected)
    assert (scores[1] > -torch.inf).sum() == 1, "alpha 1 keeps the best token alone"


def test_cold_ignores_a_constant_added_to_a_models_logits():
    generator = torch.Generator().manual_seed(1)
    expert, amateur = torch.randn(50, generator=generator), torch.randn(50, generator=generator)
    plain = cold_scores(expert, amateur, 0.1, 0.5).softmax(-1)
    shifted = cold_scores(expert.log_softmax(-1), amateur.log_softmax(-1), 0.1, 0.5).softmax(-1)
    torch.testing.assert_close(plain, shifted)
