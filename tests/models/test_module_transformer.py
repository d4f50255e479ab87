"""Families without a fused decoder run as transformers' own modules, and give what transformers and PEFT give."""

import copy
import dataclasses
import json

import pytest
import torch
from engine import random_adapter, random_batch, resident, tenant
from families import random_model
from peft import PeftModel

from marlaas.attention import Block, BlockAttention
from marlaas.errors import AdapterError, ModelError
from marlaas.lora import AdapterLayout, AdapterShape, LoraBatch, Segment, export_peft, import_peft, targets_of
from marlaas.models import decoder_of, load_base_model
from marlaas.module_transformer import ModuleTransformer, check_family
from marlaas.sampling import native
from marlaas.sampling.native import NativeSampler
from marlaas.sampling.protocol import Decoding, SamplingRequest
from marlaas.specs import TARGETS, ModelSpec
from marlaas.training.trainer import Trainer
from marlaas.transformer import ARCHITECTURES, Transformer

PROMPTS = [(5, 6, 7, 8, 9), (10, 11), (12, 13, 14), (15,)]
FAMILIES = ("gemma", "gemma3_text", "olmo2", "granite", "cohere", "phi3", "qwen3_moe")


def base_with(tiny, decoder):
    return dataclasses.replace(tiny, transformer=decoder, stop_ids=frozenset())


def adapters_of(base):
    targets = targets_of(base.transformer)
    return {"a/x/v1": random_adapter(base, 4, 1, targets), "b/x/v1": random_adapter(base, 2, 2, targets[::2])}


def moved(adapters, source, target):
    """The same adapters, laid out for another decoder of the model."""
    files = {name: export_peft(layout, vector, source, "x") for name, (layout, vector) in adapters.items()}
    return {name: import_peft(of_one, target) for name, of_one in files.items()}


def generated(base, adapters, max_tokens=6):
    """Greedy samples of each prompt under each adapter and none: they join, leave and come back with more tokens."""
    sampler, samples = NativeSampler(base, resident(base, adapters), 5, 32, 500), {}

    def ask(prompt, name):
        request = SamplingRequest(
            "t", tuple(prompt), name, Decoding.GREEDY, max_tokens, frozenset(), session=f"{prompt[0]} {name}"
        )
        sampler.submit(request, lambda sample: samples.__setitem__((tuple(prompt), name), sample))

    for prompt in PROMPTS:
        for name in (None, *adapters):
            ask(prompt, name)
    while sampler.busy:
        sampler.step()
    for (prompt, name), sample in list(samples.items()):
        ask([*prompt, *sample.tokens, 20, 21, 22], name)
    while sampler.busy:
        sampler.step()
    assert sum(sample.reused_tokens > 0 for sample in samples.values()) > 4
    return samples


def gradients(base, adapters):
    """Of one training step of two jobs in one pass: job -> name of a matrix -> gradient."""
    jobs = {"a/x": adapters["a/x/v1"], "b/x": adapters["b/x/v1"]}
    trainer = Trainer(base, 2, 40_000, 256)
    for job, (layout, vector) in jobs.items():
        shape = layout.shape
        lora = {"rank": shape.rank, "alpha": shape.alpha, "targets": shape.targets}
        trainer.open(job, tenant(job[0], lora=lora))
        trainer[job].weights.copy_(vector)
    trainer.update([random_batch(base, job, 3) for job in jobs])
    return {
        job: {t.name: t.tensor for t in layout.tensors(trainer[job].vectors.gradient, base.transformer.sites)}
        for job, (layout, _) in jobs.items()
    }


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_family_with_a_fused_decoder_samples_and_trains_the_same_through_its_module(tiny, kind, monkeypatch):
    monkeypatch.setattr(native, "cpu_passes", lambda *given: None)
    model = random_model(kind)
    fused = base_with(tiny, Transformer(model))
    general = base_with(tiny, ModuleTransformer(copy.deepcopy(model)))
    assert general.transformer.geometry == fused.transformer.geometry
    adapters = adapters_of(fused)
    same = moved(adapters, fused.transformer, general.transformer)
    expected, got = generated(fused, adapters), generated(general, same)
    assert {key: sample.tokens for key, sample in got.items()} == {key: s.tokens for key, s in expected.items()}
    for key, sample in got.items():
        assert sample.logprobs == pytest.approx(expected[key].logprobs, abs=1e-4)
    torch.testing.assert_close(gradients(general, same), gradients(fused, adapters), atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("kind", FAMILIES)
def test_greedy_tokens_and_logprobs_of_a_mixed_batch_are_those_of_transformers_and_peft_alone(tiny, kind, tmp_path):
    model = random_model(kind)
    model.generation_config.eos_token_id = None
    base = base_with(tiny, decoder_of(copy.deepcopy(model)))
    assert isinstance(base.transformer, ModuleTransformer)
    adapters = adapters_of(base)
    samples = generated(base, adapters)
    for name in (None, *adapters):
        alone = model if name is None else in_peft(model, base, adapters[name], tmp_path / name)
        for (prompt, of), sample in samples.items():
            if of == name:
                ids = torch.tensor([prompt])
                output = alone.generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False,
                    return_dict_in_generate=True, output_logits=True,
                )  # fmt: skip
                assert sample.tokens == output.sequences[0, len(prompt) :].tolist()
                logprobs = [
                    float(of_all[0].log_softmax(-1)[t]) for of_all, t in zip(output.logits, sample.tokens, strict=True)
                ]
                assert sample.logprobs == pytest.approx(logprobs, abs=1e-4)
    assert len({tuple(s.tokens) for s in samples.values()}) > len(PROMPTS), "the adapters must change what is said"


@pytest.mark.parametrize("kind", FAMILIES)
def test_lora_gradients_of_a_mixed_batch_are_those_of_peft_alone(tiny, kind, tmp_path):
    model = random_model(kind)
    base = base_with(tiny, decoder_of(copy.deepcopy(model)))
    t, adapters = base.transformer, adapters_of(base)
    tokens = torch.randint(0, 99, (2, 6), generator=torch.Generator().manual_seed(0))
    weight = torch.randn(6, 99, generator=torch.Generator().manual_seed(1))
    buffers = {name: torch.zeros(layout.size) for name, (layout, _) in adapters.items()}
    segments = [
        Segment(6 * i, 6 * i + 6, layout, vector, buffers[name])
        for i, (name, (layout, vector)) in enumerate(adapters.items())
    ]
    attend = BlockAttention([Block(2, 6)])
    hidden = t.hidden_states(tokens.flatten(), torch.arange(6).repeat(2), attend, LoraBatch(segments))
    (t.logits(hidden).view(2, 6, 99) * weight).sum().backward()
    for row, (name, (layout, vector)) in zip(tokens, adapters.items(), strict=True):
        alone = in_peft(model, base, (layout, vector), tmp_path / name, trains=True)
        (alone(row[None]).logits[0] * weight).sum().backward()
        parameters = {n.replace(".default", ""): p for n, p in alone.named_parameters() if p.requires_grad}
        assert len(parameters) == len(list(layout.tensors(vector, t.sites)))
        for matrix in layout.tensors(buffers[name], t.sites):
            ending = f".{matrix.layer}.{'self_attn' if matrix.module[0] in 'qkvo' else 'mlp'}.{matrix.module}"
            (expected,) = (p.grad for n, p in parameters.items() if f"{ending}.lora_{matrix.matrix}.weight" in n)
            scale = float(expected.abs().max())
            assert scale > 0
            torch.testing.assert_close(matrix.tensor, expected, atol=1e-4 * scale, rtol=1e-3)


def in_peft(model, base, adapter, folder, trains=False):
    folder.mkdir(parents=True)
    for file, data in export_peft(*adapter, base.transformer, "x").items():
        (folder / file).write_bytes(data)
    return PeftModel.from_pretrained(copy.deepcopy(model), folder, is_trainable=trains)


def test_gemma_is_loaded_as_its_module_and_all_that_ends_a_turn_is_a_stop(tiny_gemma):
    assert isinstance(tiny_gemma.transformer, ModuleTransformer)
    assert tiny_gemma.transformer.geometry.kv_heads == 1
    assert targets_of(tiny_gemma.transformer) == TARGETS
    assert tiny_gemma.stop_ids == {2, 5}
    sampler = NativeSampler(tiny_gemma, resident(tiny_gemma, adapters_of(tiny_gemma)), 2, 16)
    assert sampler._cpu is None, "the processor's kernels compute the fused decoder only"
    sampler.calibrate()


def test_in_bfloat16_a_module_agrees_with_transformers_as_far_as_the_type_goes():
    assert ModuleTransformer(random_model("gemma").to(torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "change", "longest"),
    [
        ("gemma", {}, 256),
        ("gemma3_text", {}, 32),
        ("gemma3_text", {"layer_types": ["full_attention"] * 2}, 256),
        ("phi3", {}, 64),
        ("phi3", {"sliding_window": 40}, 40),
    ],
)
def test_the_longest_sequence_ends_before_windows_and_longer_rotary_frequencies_begin(kind, change, longest):
    assert ModuleTransformer(random_model(kind, **change)).geometry.max_positions == longest


def test_padding_beyond_the_longest_sequence_changes_nothing():
    decoder = ModuleTransformer(random_model("phi3"))
    tokens, attend = torch.arange(5, 15), BlockAttention([Block(2, 5)])
    with torch.no_grad():
        plain = decoder.hidden_states(tokens, torch.arange(5).repeat(2), attend, None)
        beyond = decoder.hidden_states(tokens, torch.tensor([0, 1, 2, 3, 4, 0, 1, 90, 91, 92]), attend, None)
    assert torch.equal(plain[:7], beyond[:7])


def test_a_target_that_a_family_does_not_have_is_refused_with_those_that_it_has(tiny):
    decoder = ModuleTransformer(random_model("phi3"))
    with pytest.raises(AdapterError, match=r"'q_proj'.*match no module of the base, which has o_proj, down_proj"):
        AdapterLayout(decoder, AdapterShape(4, 8.0, TARGETS))


def test_a_target_that_peft_would_also_find_elsewhere_is_not_one():
    """Qwen2-MoE has a gate_proj in each layer's shared expert: PEFT would want an adapter for it."""
    decoder = ModuleTransformer(random_model("qwen2_moe", mlp_only_layers=[0]))
    assert targets_of(decoder) == TARGETS[:4]


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("gemma2", {}, "model_type 'gemma2' is not supported: attn_logit_softcapping 50.0; allowed is none"),
        ("gemma2", {"attn_logit_softcapping": None}, "final_logit_softcapping 30.0; allowed is none"),
        ("gpt2", {}, "model_type 'gpt2' is not supported: no plain linear is one of q_proj"),
        ("bert", {}, "model_type 'bert' is not supported: its head is no plain linear|no plain linear is one of"),
        ("falcon_h1", {}, "model_type 'falcon_h1' is not supported: it mixes neighbouring tokens in convolutions"),
        ("clip", {}, "model_type 'clip' is not supported: it is no causal language model"),
    ],
)
def test_a_family_that_cannot_run_is_refused_before_its_weights_are_read(tmp_path, kind, change, says):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} | change))
    with pytest.raises(ModelError, match=says):
        load_base_model(ModelSpec(source=str(tmp_path), device="cpu"))


def test_a_family_that_transformers_does_not_know_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "quill7"}))
    with pytest.raises(ModelError, match="model_type 'quill7' is not supported: The checkpoint you are trying to load"):
        load_base_model(ModelSpec(source=str(tmp_path), device="cpu"))


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("gpt_oss", {"num_local_experts": 4, "head_dim": 16}, "its attention takes s_aux"),
        ("minimax", {"num_local_experts": 4}, "of its 2 layers, 1 attend through"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "its logits here differ from transformers' by"),
        ("hyperclovax", {"logits_scaling": 3.0}, "its logits here differ from transformers' by"),
    ],
)
def test_a_family_that_would_be_computed_wrongly_is_refused_by_the_probe(kind, change, says):
    model = random_model(kind, **change)
    check_family(model.config)
    with pytest.raises(ModelError, match=says):
        ModuleTransformer(model)
