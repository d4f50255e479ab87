"""Small real engines for tests: the tiny random Llama, adapters with weights that matter, and samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from marlaas.lora import AdapterBank, AdapterLayout, AdapterShape, PagedAdapters
from marlaas.models import BaseModel, load_base_model
from marlaas.specs import TARGETS, ModelSpec, TenantSpec
from marlaas.training.batch import TrainingBatch, TrainingSample


def tiny_model(cache: Path, dtype: str = "float32") -> BaseModel:
    return load_base_model(ModelSpec(source="tiny-random", dtype=dtype, device="cpu", cache=cache))


def tiny_gemma_model(tiny: BaseModel, folder: Path) -> BaseModel:
    """Saves and loads one with the vocabulary of `tiny`; token 5 ends a turn in it, too."""
    from transformers import GemmaConfig, GemmaForCausalLM, GenerationConfig

    config = GemmaConfig(
        vocab_size=tiny.transformer.geometry.vocabulary,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = GemmaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1, eos_token_id=[2, 5])
    model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return load_base_model(ModelSpec(source=str(folder), dtype="float32", device="cpu"))


def tenant(name: str = "a", **fields: object) -> TenantSpec:
    environment = {"kind": "reasoning_gym", "dataset": "chain_sum"}
    return TenantSpec.model_validate({"name": name, "environment": environment, "steps": 10, **fields})


def random_adapter(base: BaseModel, rank: int, seed: int, targets: tuple[str, ...] = TARGETS):
    """Layout and a vector whose deltas are large enough to change what the model says."""
    layout = AdapterLayout(base.transformer, AdapterShape(rank, 2.0 * rank, targets))
    generator = torch.Generator().manual_seed(seed)
    return layout, torch.randn(layout.size, generator=generator) * 0.08


def resident(
    base: BaseModel, adapters: dict[str, tuple[AdapterLayout, torch.Tensor]], slots: int | None = None
) -> PagedAdapters:
    """The adapters, with as many slots as there are of them, or fewer."""
    size = max(layout.size for layout, _ in adapters.values())
    bank = AdapterBank(slots or len(adapters), size, base.transformer.dtype, base.transformer.device)
    paged = PagedAdapters(bank)
    for name, (layout, vector) in adapters.items():
        paged.add(name, layout, vector)
    return paged


def random_batch(base: BaseModel, job: str, seed: int, groups: int = 3, members: int = 4) -> TrainingBatch:
    """Groups that share a prompt of random length, completions of random lengths, plausible log-probs."""
    rng = np.random.default_rng(seed)
    vocabulary, samples = base.transformer.geometry.vocabulary, []
    for group in range(groups):
        prompt = rng.integers(0, vocabulary, rng.integers(3, 12))
        for _ in range(members):
            own = rng.integers(0, vocabulary, rng.integers(1, 9))
            mask = np.r_[np.zeros(len(prompt), bool), np.ones(len(own), bool)]
            logprobs = np.where(mask, rng.uniform(-8, -3, len(mask)), 0.0)
            tokens = np.r_[prompt, own]
            samples.append(TrainingSample(str(group), tokens, mask, logprobs, float(rng.integers(0, 2))))
    return TrainingBatch(job, samples)
