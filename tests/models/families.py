"""Small random models of many families."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 6,
    "long_factor": [4.0] * 6,
    "original_max_position_embeddings": 64,
}
EXTRA = {
    "llama": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}, "head_dim": 16},
    "mistral": {"sliding_window": None, "tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "granite": {"attention_multiplier": 0.2, "logits_scaling": 4.0, "embedding_multiplier": 3.0},
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
}


def random_model(kind, **changes):
    """In fp32, with biases and norms that are not 0 and 1."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SMALL | EXTRA.get(kind, {}) | changes))
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    return model
