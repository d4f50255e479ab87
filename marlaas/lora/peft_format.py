"""PEFT's file format, both ways: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from marlaas.errors import AdapterError
from marlaas.lora.layout import AdapterLayout, AdapterShape
from marlaas.specs import TARGETS
from marlaas.transformer import Decoder, module_path

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
# Options of PEFT's LoraConfig that change what an adapter computes, with the one value that we run.
_PLAIN = {
    "use_dora": False,
    "use_rslora": False,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "bias": "none",
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "layers_to_transform": None,
    "alora_invocation_tokens": None,
}


def export_peft(layout: AdapterLayout, vector: torch.Tensor, transformer: Decoder, base_model: str) -> dict[str, bytes]:
    """The two files of a PEFT folder, by name. `vector` is `[layout.size]`; weights are written in its dtype."""
    state = {
        _peft_name(t.layer, t.module, t.matrix): t.tensor.detach().cpu().contiguous()
        for t in layout.tensors(vector, transformer.sites)
    }
    shape = layout.shape
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": shape.rank,
        "lora_alpha": shape.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(shape.targets),
        "inference_mode": True,
        **_PLAIN,
    }
    return {WEIGHTS_FILE: save(state), CONFIG_FILE: json.dumps(config, indent=2).encode()}


def import_peft(files: Mapping[str, bytes], transformer: Decoder) -> tuple[AdapterLayout, torch.Tensor]:
    """Layout and fp32 vector `[layout.size]` on the CPU of a PEFT folder's files.

    Raises AdapterError when a file is missing or damaged, when the adapter is of a kind the engine does not run,
    when a tensor is missing, left over, of another shape or not finite: nothing is ever loaded in part.
    """
    shape = _read_shape(_required(files, CONFIG_FILE))
    layout = AdapterLayout(transformer, shape)
    try:
        state = load(_required(files, WEIGHTS_FILE))
    except SafetensorError as error:
        raise AdapterError(f"{WEIGHTS_FILE} cannot be read: {error}") from None
    vector = torch.zeros(layout.size)
    for t in layout.tensors(vector, transformer.sites):
        name = _peft_name(t.layer, t.module, t.matrix)
        if name not in state:
            raise AdapterError(f"{WEIGHTS_FILE}: {name} is missing")
        given = state.pop(name)
        if given.shape != t.tensor.shape:
            raise AdapterError(
                f"{WEIGHTS_FILE}: {name} has shape {list(given.shape)}; the base model needs {list(t.tensor.shape)}"
            )
        if not torch.isfinite(given).all():
            raise AdapterError(f"{WEIGHTS_FILE}: {name} has values that are not finite")
        t.tensor.copy_(given)
    if state:
        raise AdapterError(f"{WEIGHTS_FILE}: {sorted(state)[0]} matches no target module ({len(state)} such tensors)")
    return layout, vector


def _read_shape(raw: bytes) -> AdapterShape:
    try:
        config: dict[str, Any] = json.loads(raw)
    except ValueError as error:
        raise AdapterError(f"{CONFIG_FILE} is not JSON: {error}") from None
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{CONFIG_FILE}: peft_type {config.get('peft_type')!r} is not allowed; LORA is")
    for key, plain in _PLAIN.items():
        if config.get(key, plain) not in (plain, None):
            raise AdapterError(f"{CONFIG_FILE}: {key} {config[key]!r} is not supported; allowed is {plain!r}")
    targets = config.get("target_modules")
    if not isinstance(targets, list) or not targets or not set(targets) <= set(TARGETS):
        raise AdapterError(f"{CONFIG_FILE}: target_modules {targets!r} must be a list of {', '.join(TARGETS)}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise AdapterError(f"{CONFIG_FILE}: r {rank!r} and lora_alpha {alpha!r} must be numbers, r at least 1")
    return AdapterShape(rank, float(alpha), tuple(t for t in TARGETS if t in targets))


def _required(files: Mapping[str, bytes], name: str) -> bytes:
    if name not in files:
        raise AdapterError(f"the adapter has no {name}; its files are {sorted(files)}")
    return files[name]


def _peft_name(layer: int, module: str, matrix: str) -> str:
    return f"base_model.model.{module_path(layer, module)}.lora_{matrix}.weight"
