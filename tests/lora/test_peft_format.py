"""Adapters go to PEFT's files and back, and compute there what they compute here."""

import json

import pytest
import torch
from engine import random_adapter
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load, save
from transformers import AutoModelForCausalLM

from marlaas.attention import Block, BlockAttention
from marlaas.errors import AdapterError
from marlaas.lora import AdapterBank, AdapterLayout, AdapterShape, LoraBatch, Segment, export_peft, import_peft
from marlaas.lora.peft_format import CONFIG_FILE, WEIGHTS_FILE
from marlaas.specs import TARGETS


def native_logits(base, tokens, layout, vector):
    with torch.no_grad():
        lora = LoraBatch([Segment(0, len(tokens), layout, vector)])
        attend = BlockAttention([Block(1, len(tokens))])
        ids = torch.tensor(tokens)
        return base.transformer.logits(base.transformer.hidden_states(ids, torch.arange(len(ids)), attend, lora))


def test_two_tenants_of_different_rank_load_in_peft_and_give_the_native_logits(tiny, tmp_path):
    tokens = tiny.tokenizer("A prompt of some length, 12 + 7 = ")["input_ids"]
    adapters = {"a": random_adapter(tiny, 4, 1), "b": random_adapter(tiny, 16, 2, ("q_proj", "up_proj", "down_proj"))}
    plain = AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.float32)
    for name, (layout, vector) in adapters.items():
        folder = tmp_path / name
        folder.mkdir()
        for file, data in export_peft(layout, vector, tiny.transformer, str(tiny.folder)).items():
            (folder / file).write_bytes(data)
        fresh = AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.float32)
        model = PeftModel.from_pretrained(fresh, folder)
        with torch.no_grad():
            expected, base = (m(torch.tensor([tokens])).logits[0] for m in (model, plain))
        assert (native_logits(tiny, tokens, layout, vector) - expected).abs().max() <= 1e-4
        assert (expected - base).abs().max() > 0.1, "the adapter must matter"


def test_an_adapter_that_peft_made_gives_the_same_logits_here(tiny, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.float32)
    config = LoraConfig(r=6, lora_alpha=9, target_modules=["k_proj", "o_proj", "gate_proj"], init_lora_weights=False)
    model = get_peft_model(model, config)
    model.save_pretrained(tmp_path)
    layout, vector = import_peft({p.name: p.read_bytes() for p in tmp_path.iterdir()}, tiny.transformer)
    assert layout.shape == AdapterShape(6, 9.0, ("k_proj", "o_proj", "gate_proj"))
    tokens = tiny.tokenizer("hello, world")["input_ids"]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    assert (native_logits(tiny, tokens, layout, vector) - expected).abs().max() <= 1e-4


def test_export_and_import_are_inverse_bit_for_bit(tiny):
    layout, vector = random_adapter(tiny, 3, 7, ("v_proj", "gate_proj"))
    read_layout, read = import_peft(export_peft(layout, vector, tiny.transformer, "x"), tiny.transformer)
    assert read_layout.shape == layout.shape
    assert torch.equal(read, vector)


def harm(files, **config):
    document = json.loads(files[CONFIG_FILE]) | config
    return files | {CONFIG_FILE: json.dumps(document).encode()}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: {CONFIG_FILE: f[CONFIG_FILE]}, "the adapter has no adapter_model.safetensors"),
        (lambda f: f | {CONFIG_FILE: b"{"}, "adapter_config.json is not JSON"),
        (lambda f: f | {WEIGHTS_FILE: b"junk"}, "adapter_model.safetensors cannot be read"),
        (lambda f: harm(f, peft_type="IA3"), "peft_type 'IA3' is not allowed"),
        (lambda f: harm(f, use_dora=True), "use_dora True is not supported"),
        (lambda f: harm(f, target_modules=["lm_head"]), "must be a list of q_proj"),
        (lambda f: harm(f, r=0), "r at least 1"),
        (lambda f: harm(f, r=5), "has shape"),
        (lambda f: harm(f, target_modules=["q_proj", "v_proj", "o_proj"]), "o_proj.lora_A.weight is missing"),
        (lambda f: harm(f, target_modules=["q_proj"]), "v_proj.* matches no target module"),
    ],
)
def test_what_would_load_in_part_or_wrongly_is_refused(tiny, change, says):
    layout, vector = random_adapter(tiny, 4, 1, ("q_proj", "v_proj"))
    files = export_peft(layout, vector, tiny.transformer, "x")
    with pytest.raises(AdapterError, match=says):
        import_peft(change(files), tiny.transformer)


def test_weights_that_are_not_finite_are_refused(tiny):
    layout, vector = random_adapter(tiny, 4, 1)
    files = export_peft(layout, vector, tiny.transformer, "x")
    state = load(files[WEIGHTS_FILE])
    state[min(state)][0, 0] = torch.nan
    with pytest.raises(AdapterError, match="not finite"):
        import_peft(files | {WEIGHTS_FILE: save(state)}, tiny.transformer)


def test_a_fresh_adapter_is_peft_s_start_and_says_what_the_base_says(tiny):
    layout = AdapterLayout(tiny.transformer, AdapterShape(4, 8.0, TARGETS))
    vector = torch.empty(layout.size)
    layout.initialise_(vector, tiny.transformer.sites, seed=3)
    again = torch.empty(layout.size)
    layout.initialise_(again, tiny.transformer.sites, seed=3)
    assert torch.equal(vector, again)
    for t in layout.tensors(vector, tiny.transformer.sites):
        bound = t.tensor.shape[1] ** -0.5
        if t.matrix == "B":
            assert (t.tensor == 0).all()
        else:
            assert 0.9 * bound < t.tensor.abs().max() <= bound
    tokens = tiny.tokenizer("hello")["input_ids"]
    zero = torch.zeros(layout.size)
    assert torch.equal(native_logits(tiny, tokens, layout, vector), native_logits(tiny, tokens, layout, zero))


def test_targets_that_match_nothing_are_an_error(tiny):
    with pytest.raises(AdapterError, match="match no module"):
        AdapterLayout(tiny.transformer, AdapterShape(4, 8.0, ("w_pack",)))


def test_a_slot_never_shows_its_last_owner_s_weights(tiny):
    layout, vector = random_adapter(tiny, 2, 1)
    bank = AdapterBank(1, layout.size, torch.float32, torch.device("cpu"))
    bank.add("a/x/v1", layout).vector.copy_(vector)
    with pytest.raises(AdapterError, match="all 1 adapter slots are taken"):
        bank.add("b/x/v1", layout)
    bank.remove("a/x/v1")
    assert (bank.add("b/x/v1", layout).vector == 0).all()
    larger = AdapterLayout(tiny.transformer, AdapterShape(4, 2.0, TARGETS))
    with pytest.raises(AdapterError, match="a slot has room for"):
        AdapterBank(1, layout.size, torch.float32, torch.device("cpu")).add("c/x/v1", larger)
