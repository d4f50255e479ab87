"""The benchmarks' base model: a Llama of 4 M parameters with random weights, and a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path

import torch

from marlaas.models import TINY_RANDOM, resolve_model

FOLDER = Path(".bench/models/small-4m")


def small_model() -> Path:
    """The folder of the model, made once. What it says has no meaning; how long that takes has."""
    if (FOLDER / "config.json").exists():
        return FOLDER
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(TINY_RANDOM, Path(".bench/models")))
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    partial = FOLDER.with_name("partial")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(FOLDER)
    return FOLDER
