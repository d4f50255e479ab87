"""The processor's passes give the decoder's logits: every architecture, both types, any mix of adapters and lengths."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from marlaas.attention import Block, BlockAttention, KeyValueCache
from marlaas.lora import AdapterBank, AdapterLayout, AdapterShape, LoraBatch, PagedAdapters, Segment
from marlaas.sampling.cpu_passes import CpuPasses, FlatPass
from marlaas.sampling.passes import Generation, Row
from marlaas.sampling.protocol import Decoding, SamplingRequest
from marlaas.specs import TARGETS
from marlaas.transformer import ARCHITECTURES, Transformer

SMALL = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
EXTRA = {
    "llama": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}, "head_dim": 16},
    "mistral": {"sliding_window": None, "tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
}
SHAPES = {
    "a/x/v1": AdapterShape(8, 16.0, TARGETS),
    "b/x/v1": AdapterShape(3, 6.0, ("q_proj", "v_proj", "down_proj")),
    "c/x/v1": AdapterShape(8, 16.0, TARGETS),
}
ROWS = [("a/x/v1", 5), ("b/x/v1", 1), (None, 3), ("c/x/v1", 2), ("a/x/v1", 4), (None, 1)]


def random_decoder(kind, dtype):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SMALL | EXTRA[kind]))).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1  # biases and norms that are not 0 and 1
    return Transformer(model.to(dtype))


def random_adapters(transformer):
    layouts = {name: AdapterLayout(transformer, shape) for name, shape in SHAPES.items()}
    size = max(layout.size for layout in layouts.values())
    adapters = PagedAdapters(AdapterBank(len(layouts), size, transformer.dtype, transformer.device))
    for name, layout in layouts.items():
        adapters.add(name, layout, torch.randn(layout.size) * 0.1)
    return adapters


def expected_logits(transformer, adapters, contents, names):
    """Of each row's last token, by the torch decoder, one row at a time and from its first token on."""
    out = []
    for content, name in zip(contents, names, strict=True):
        segments = []
        if name is not None:
            r = adapters[name]
            segments = [Segment(0, len(content), r.layout, r.vector)]
        attend, positions = BlockAttention([Block(1, len(content))]), torch.arange(len(content))
        hidden = transformer.hidden_states(torch.tensor(content), positions, attend, LoraBatch(segments))
        out.append(transformer.logits(hidden[-1:]))
    return torch.cat(out).float()


@pytest.mark.parametrize("whole", [True, False], ids=["one call", "blocks"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 6e-2)])
@pytest.mark.parametrize("kind", ARCHITECTURES)
@torch.inference_mode()
def test_logits_are_those_of_the_decoder(kind, dtype, tolerance, whole):
    transformer = random_decoder(kind, dtype)
    adapters = random_adapters(transformer)
    cache = KeyValueCache(transformer.geometry, len(ROWS), 32, dtype, torch.device("cpu"))
    passes = CpuPasses(transformer, cache, adapters)
    passes.small = 10**9 if whole else 0
    contents = [torch.randint(0, 320, (length,)).tolist() for _, length in ROWS]
    rows = [Row(name, index) for index, (name, _) in enumerate(ROWS)]
    for name in SHAPES:
        adapters.page_in(name, set(SHAPES))
    for _ in range(3):
        items = []
        for row, content in zip(rows, contents, strict=True):
            request = SamplingRequest("t", tuple(content), row.adapter, Decoding.GREEDY, 1, frozenset())
            items.append((row, Generation(request, lambda outcome: None, [row], content)))
        got = passes.logits(FlatPass.of(items), rows).float()
        expected = expected_logits(transformer, adapters, contents, [row.adapter for row in rows])
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * float(expected.abs().max()))
        for row, content, logits in zip(rows, contents, expected, strict=True):
            row.length = len(content)
            content.append(int(logits.argmax()))


@torch.inference_mode()
def test_calibration_chooses_among_sizes_that_fit_and_leaves_the_answers_alone():
    transformer = random_decoder("llama", torch.float32)
    adapters = random_adapters(transformer)
    cache = KeyValueCache(transformer.geometry, 4, 32, torch.float32, torch.device("cpu"))
    passes = CpuPasses(transformer, cache, adapters)
    passes.calibrate(position=7)
    assert passes.small in (0, 1, 2, 4)
