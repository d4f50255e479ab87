"""Batches through tables and the Triton kernels, in the interpreter, give what torch gives segment by segment."""

from dataclasses import replace

import interpreter  # noqa: F401
import pytest
import torch
from engine import random_adapter, random_batch, resident, tenant, tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marlaas.attention import Block, BlockAttention
from marlaas.lora import AdapterLayout, AdapterShape, LoraBatch, Segment
from marlaas.sampling import native
from marlaas.sampling.native import NativeSampler
from marlaas.sampling.protocol import Decoding, SamplingRequest
from marlaas.specs import TARGETS
from marlaas.training.trainer import Trainer
from marlaas_kernels import registry

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
PASSES_TOLERANCE = 1e-4  # of the logits of a whole model in fp32
GUARD = 7  # elements between adapters in memory, which nobody may write


@st.composite
def adapters(draw):
    """(tokens, tokens of the base before them, rank, targets) of each segment."""
    segment = st.tuples(
        st.one_of(st.just(0), st.integers(1, 20), st.integers(1, 40)),
        st.integers(0, 2),
        st.one_of(st.integers(1, 24), st.sampled_from([1, 8, 16, 64, 128])),
        st.lists(st.sampled_from(TARGETS), min_size=1, unique=True).map(tuple),
    )
    return draw(st.lists(segment, max_size=4))


def placed(transformer, drawn, dtype):
    """The segments, with random vectors and gradients so far in two banks, and how many tokens there are."""
    layouts = [AdapterLayout(transformer, AdapterShape(rank, 2.0 * rank, targets)) for _, _, rank, targets in drawn]
    begin, token, segments = GUARD, 0, []
    bank = torch.randn(GUARD + sum(layout.size + GUARD for layout in layouts)) * 0.1
    gradients, bank = torch.randn(bank.shape), bank.to(dtype)
    for layout, (tokens, gap, _, _) in zip(layouts, drawn, strict=True):
        place = slice(begin, begin + layout.size)
        segments.append(Segment(token + gap, token + gap + tokens, layout, bank[place], gradients[place]))
        begin, token = begin + layout.size + GUARD, token + gap + tokens
    return segments, gradients, token + 2


def trained(lora, site, x, y, dy):
    """y with the deltas and x's gradient, in a training pass; the adapters' gradients are in the segments' buffers."""
    x = x.clone().requires_grad_()
    y = lora.add(site, x, y + 0 * x.sum())
    y.backward(dy)
    return y.detach(), x.grad


def close(got, expected):
    magnitude = float(expected.float().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE[expected.dtype] * max(magnitude, 1.0))


@pytest.mark.parametrize("dtype", TOLERANCE)
@given(drawn=adapters(), kind=st.integers(0, 3), seed=st.integers(0, 2**31))
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_linear_forward_and_backward(tiny, kernels_everywhere, dtype, drawn, kind, seed):
    torch.manual_seed(seed)
    site = tiny.transformer.layers[-1].sites[kind]
    segments, gradients, tokens = placed(tiny.transformer, drawn, dtype)
    x, y, dy = (torch.randn(tokens, n).to(dtype) for n in (site.inputs, *[site.weight.shape[0]] * 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(registry.KERNELS, "cpu")
        expected_gradients = gradients.clone()
        in_torch = LoraBatch(
            [replace(s, gradient=expected_gradients[s.gradient.storage_offset() :][: s.layout.size]) for s in segments]
        )
        expected_y, expected_dx = trained(in_torch, site, x, y, dy)
    lora = LoraBatch(segments)
    with torch.inference_mode():
        inferred = lora.add(site, x, y.clone())
    got_y, dx = trained(lora, site, x, y, dy)
    assert torch.equal(inferred, got_y)
    close(got_y, expected_y)
    close(dx, expected_dx)
    magnitude = max(1.0, float(expected_gradients.abs().max()))
    torch.testing.assert_close(gradients, expected_gradients, rtol=0, atol=TOLERANCE[dtype] * magnitude)
    base = torch.ones(tokens, dtype=torch.bool)
    for s in segments:
        base[s.start : s.end] = False
    assert torch.equal(got_y[base], y[base]), "tokens without adapter are not touched"


def test_a_whole_pass_with_slots_of_a_bank(tiny, kernels_everywhere, monkeypatch):
    paged = resident(tiny, {"a": random_adapter(tiny, 8, 1), "b": random_adapter(tiny, 3, 2, ("q_proj", "up_proj"))})
    segments = []
    for name, start, end in (("b", 0, 5), ("a", 6, 26), ("b", 26, 27)):  # one adapter may have two segments
        assert paged.page_in(name, ())
        segments.append(Segment(start, end, paged[name].layout, paged[name].vector, slot=paged[name].slot))
    tokens = torch.arange(30) % tiny.transformer.geometry.vocabulary
    attend = BlockAttention([Block(1, 30)])
    logits = []
    with torch.inference_mode():
        for _ in range(2):
            lora = LoraBatch(segments, paged.weights_SP)
            hidden = tiny.transformer.hidden_states(tokens, torch.arange(30), attend, lora)
            logits.append(tiny.transformer.logits(hidden))
            monkeypatch.delitem(registry.KERNELS, "cpu", raising=False)
    torch.testing.assert_close(*logits, rtol=0, atol=PASSES_TOLERANCE)


def test_tables_are_made_once_a_batch_and_kind_of_linear(tiny, kernels_everywhere, monkeypatch):
    from marlaas_kernels.table import SegmentTable

    made = []
    of_layers = SegmentTable.of_layers
    monkeypatch.setattr(SegmentTable, "of_layers", lambda *given: made.append(1) or of_layers(*given))
    segments, _, tokens = placed(tiny.transformer, [(3, 0, 4, TARGETS)], torch.float32)
    lora = LoraBatch(segments)
    ids = torch.zeros(tokens, dtype=torch.long)
    assert len(tiny.transformer.layers) > 1
    tiny.transformer.hidden_states(ids, ids, BlockAttention([Block(1, tokens)]), lora).sum().backward()
    assert len(made) == 2 * 4, "of the weights and of the gradients"


def updated(base, steps):
    specs = {
        "a/x": tenant("a", lora={"rank": 4, "alpha": 8}, seed=1),
        "b/x": tenant("b", lora={"rank": 12, "alpha": 8, "targets": ["q_proj", "v_proj", "down_proj"]}, seed=2),
    }
    trainer = Trainer(base, slots=3, slot_size=40_000, micro_batch_tokens=96)
    for job, spec in specs.items():
        trainer.open(job, spec)
    for step in range(steps):
        results = trainer.update(
            [random_batch(base, job, 10 * step + i, groups=2, members=2) for i, job in enumerate(specs)]
        )
        assert [r.version for r in results.values()] == [step + 1] * 2
    return {job: trainer._slots.read(job) for job in specs}


def test_updates_of_a_trainer(tiny, kernels_everywhere, monkeypatch):
    got = updated(tiny, steps=2)
    assert kernels_everywhere
    monkeypatch.delitem(registry.KERNELS, "cpu")
    for job, (weights, first, second) in updated(tiny, steps=2).items():
        torch.testing.assert_close(got[job][0], weights, rtol=0, atol=1e-5)
        torch.testing.assert_close(got[job][1], first, rtol=0, atol=1e-5 * float(first.abs().max()))
        torch.testing.assert_close(got[job][2], second, rtol=0, atol=1e-4 * float(second.abs().max()))


def test_an_update_of_a_trainer_whose_model_is_in_bfloat16(model_cache, kernels_everywhere, monkeypatch):
    base = tiny_model(model_cache, "bfloat16")
    got = updated(base, steps=1)
    assert kernels_everywhere
    monkeypatch.delitem(registry.KERNELS, "cpu")
    for job, (_, first, _) in updated(base, steps=1).items():
        torch.testing.assert_close(got[job][1], first, rtol=0, atol=3e-2 * float(first.abs().max()))


def sampled(base, adapters):
    sampler, samples = NativeSampler(base, resident(base, adapters, slots=2), 4, 64), {}
    for index, adapter in enumerate(("a/x/v1", "b/x/v1", None, "a/x/v1")):
        request = SamplingRequest("a", (5, 6 + index, 7), adapter, Decoding.GREEDY, 5, frozenset())
        sampler.submit(request, lambda sample, index=index: samples.__setitem__(index, sample))
    while sampler.busy:
        sampler.step()
    return samples


def test_samples_of_a_sampler(tiny, kernels_everywhere, monkeypatch):
    monkeypatch.setattr(native, "cpu_passes", lambda *given: None)
    adapters = {f"{name}/x/v1": random_adapter(tiny, 4 + i, i) for i, name in enumerate("ab")}
    got = sampled(tiny, adapters)
    assert kernels_everywhere
    monkeypatch.delitem(registry.KERNELS, "cpu")
    for index, sample in sampled(tiny, adapters).items():
        assert got[index].tokens == sample.tokens
        assert got[index].logprobs == pytest.approx(sample.logprobs, abs=1e-4)


def test_vectors_that_lie_apart_are_refused(tiny, kernels_everywhere):
    layout, vector = random_adapter(tiny, 2, 0)
    with pytest.raises(AssertionError, match="one tensor"):
        LoraBatch([Segment(0, 1, layout, vector), Segment(1, 2, layout, vector.clone())])


def test_a_segment_without_gradient_cannot_train(tiny, kernels_everywhere):
    layout, vector = random_adapter(tiny, 2, 0)
    site = tiny.transformer.layers[0].qkv
    x = torch.zeros(1, site.inputs, requires_grad=True)
    y = LoraBatch([Segment(0, 1, layout, vector)]).add(site, x, x @ site.weight.T)
    with pytest.raises(AssertionError, match="nowhere to put its gradient"):
        y.sum().backward()
