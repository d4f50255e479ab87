"""The native decoder gives transformers' logits for every architecture it says it runs."""

import pytest
import torch
from families import LONGROPE, random_model
from transformers import AutoModelForCausalLM

from marlaas.attention import Block, BlockAttention
from marlaas.devices import choose_device
from marlaas.errors import ModelError
from marlaas.models import decoder_of, fingerprint, load_base_model, resolve_model
from marlaas.module_transformer import ModuleTransformer
from marlaas.specs import ModelSpec
from marlaas.transformer import ARCHITECTURES, Transformer


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_logits_of_padded_rows_are_those_of_transformers_alone(kind):
    model = random_model(kind)
    native = Transformer(model)
    rows, length = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]], 5
    tokens = torch.tensor([t for row in rows for t in row + [0] * (length - len(row))])
    positions = torch.arange(length).repeat(len(rows))
    with torch.no_grad():
        attend = BlockAttention([Block(2, length), Block(1, length)])
        logits = native.logits(native.hidden_states(tokens, positions, attend, None)).view(3, length, -1)
        for row, got in zip(rows, logits, strict=True):
            torch.testing.assert_close(got[: len(row)], model(torch.tensor([row])).logits[0], atol=1e-5, rtol=1e-4)


def test_a_variant_that_the_fused_decoder_would_compute_wrongly_runs_as_its_module():
    model = random_model("llama", hidden_act="gelu")
    with pytest.raises(ModelError, match="'llama' with hidden_act 'gelu' has no fused decoder"):
        Transformer(model)
    assert isinstance(decoder_of(model), ModuleTransformer)


@pytest.mark.parametrize(
    ("kind", "change", "longest"),
    [
        ("llama", {}, 256),
        ("mistral", {"sliding_window": 16}, 16),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}, 16),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": False}, 256),
        ("qwen3", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}, 256),
        ("llama", {"rope_parameters": LONGROPE, "head_dim": 12}, 64),
    ],
)
def test_the_longest_sequence_is_the_one_up_to_which_attention_is_full_and_rotary_frequencies_constant(
    kind, change, longest
):
    assert Transformer(random_model(kind, **change)).geometry.max_positions == longest


def test_the_tiny_model_is_the_same_each_time_it_is_made(tmp_path):
    lines = []
    first = resolve_model("tiny-random", tmp_path / "one", lines.append)
    second = resolve_model("tiny-random", tmp_path / "two")
    assert fingerprint(first) == fingerprint(second)
    assert lines == [f"converting into {first} (once)"]
    resolve_model("tiny-random", tmp_path / "one", lines.append)
    assert len(lines) == 1


def test_a_source_that_is_nothing_says_what_it_could_have_been(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=r"smollm2-135m.*a folder, a .gguf file, or a hub id"):
        resolve_model("smollm2-135m", tmp_path)
    with pytest.raises(ModelError, match="is not a file"):
        resolve_model(str(tmp_path / "x.gguf"), tmp_path)
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(str(tmp_path), tmp_path)


def test_a_device_that_is_not_there_is_refused():
    assert choose_device("cpu") == torch.device("cpu")
    if torch.accelerator.is_available():
        assert choose_device("auto").type != "cpu"
    else:
        assert choose_device("auto") == torch.device("cpu")
        with pytest.raises(ModelError, match="'cuda:3' is not there; this machine has 0 cuda"):
            choose_device("cuda:3")
        with pytest.raises(ModelError, match="needs torch_npu and CANN"):
            choose_device("npu")


@pytest.mark.slow
def test_the_packaged_model_is_converted_and_speaks(tmp_path):
    base = load_base_model(ModelSpec(source="smollm2-135m-instruct", dtype="float32", device="cpu", cache=tmp_path))
    model = AutoModelForCausalLM.from_pretrained(base.folder, dtype=torch.float32)
    text = base.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    ids = torch.tensor([base.tokenizer(text, add_special_tokens=False)["input_ids"]])
    said = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert "Paris" in base.tokenizer.decode(said[0, ids.shape[1] :])
    with torch.no_grad():
        hidden = base.transformer.hidden_states(
            ids[0], torch.arange(ids.shape[1]), BlockAttention([Block(1, ids.shape[1])]), None
        )
        torch.testing.assert_close(base.transformer.logits(hidden), model(ids).logits[0], atol=1e-3, rtol=1e-4)
