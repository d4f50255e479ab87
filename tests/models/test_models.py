"""The native decoder gives transformers' logits for every architecture it says it runs."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from marlaas.attention import Block, BlockAttention
from marlaas.devices import choose_device
from marlaas.errors import ModelError
from marlaas.models import fingerprint, load_base_model, resolve_model
from marlaas.specs import ModelSpec
from marlaas.transformer import ARCHITECTURES, Transformer

SMALL = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
EXTRA = {
    "llama": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}, "head_dim": 16},
    "mistral": {"sliding_window": None, "tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
}


def random_model(kind, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SMALL | EXTRA[kind] | changes))
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_logits_of_padded_rows_are_those_of_transformers_alone(kind):
    model = random_model(kind)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1  # biases and norms that are not 0 and 1
    native = Transformer(model)
    rows, length = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]], 5
    tokens = torch.tensor([t for row in rows for t in row + [0] * (length - len(row))])
    positions = torch.arange(length).repeat(len(rows))
    with torch.no_grad():
        attend = BlockAttention([Block(2, length), Block(1, length)])
        logits = native.logits(native.hidden_states(tokens, positions, attend, None)).view(3, length, -1)
        for row, got in zip(rows, logits, strict=True):
            torch.testing.assert_close(got[: len(row)], model(torch.tensor([row])).logits[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("mistral", {"sliding_window": 16}, "sliding_window 16 is not supported"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ],
)
def test_a_variant_that_would_be_computed_wrongly_is_refused(kind, change, says):
    with pytest.raises(ModelError, match=says):
        Transformer(random_model(kind, **change))


def test_another_architecture_is_refused_before_its_weights_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ModelError, match="model_type 'gpt2' is not supported; allowed are llama"):
        load_base_model(ModelSpec(source=str(tmp_path), device="cpu"))


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
