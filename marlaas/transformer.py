"""The decoder that sampling and training share: Llama-family weights, flat token rows, multi-LoRA linears.

Every activation is two-dimensional, `[T, features]`, with the tokens of all sequences one after another. What
differs between prefill, decoding and training is only how tokens attend, so attention is passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from marlaas import cpu_layers
from marlaas.cpu_kernels import runs_here
from marlaas.errors import ModelError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Geometry:
    """The sizes of a decoder; all counts in elements."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_epsilon: float
    max_positions: int

    @staticmethod
    def of(config: Any) -> Geometry:
        """Reads a transformers config. Raises ModelError for an architecture the engine does not run."""
        if config.model_type not in ARCHITECTURES:
            raise ModelError(
                f"model_type {config.model_type!r} is not supported; allowed are {', '.join(ARCHITECTURES)}"
            )
        if config.hidden_act != "silu":
            raise ModelError(f"hidden_act {config.hidden_act!r} is not supported; allowed is silu")
        window = getattr(config, "sliding_window", None)
        if window is not None and getattr(config, "use_sliding_window", True):
            raise ModelError(f"sliding_window {window} is not supported; allowed is full attention")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return Geometry(
            vocabulary=config.vocab_size,
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            rms_epsilon=config.rms_norm_eps,
            max_positions=config.max_position_embeddings,
        )


@dataclass(frozen=True)
class Part:
    """One projection inside a fused linear: its PEFT name and its slice of the output."""

    module: str
    start: int
    size: int


@dataclass(frozen=True)
class Site:
    """A fused linear, e.g. q, k and v in one; where LoRA deltas are added.

    `weight` is `[out, in]` in the model's dtype, frozen; `parts` tile the output.
    """

    layer: int
    weight: torch.Tensor
    bias: torch.Tensor | None
    parts: tuple[Part, ...]

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]


@dataclass(frozen=True)
class Layer:
    qkv: Site
    output: Site
    gate_up: Site
    down: Site
    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None

    @property
    def sites(self) -> tuple[Site, Site, Site, Site]:
        return (self.qkv, self.output, self.gate_up, self.down)


class Lora(Protocol):
    """What adds the adapters' deltas at a site."""

    def add(self, site: Site, x_TI: torch.Tensor, y_TO: torch.Tensor) -> torch.Tensor:
        """y plus each token's own adapter applied to x."""


# (layer, query [T, heads, D], key [T, kv_heads, D], value [T, kv_heads, D]) -> [T, heads * D]
Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Transformer:
    """Frozen base weights and the forward pass over flat tokens."""

    def __init__(self, model: Any) -> None:
        """Takes the weights out of a transformers causal LM; the module itself is not kept."""
        self.geometry = Geometry.of(model.config)
        state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self.embedding = state["model.embed_tokens.weight"]
        self.head = state.get("lm_head.weight", self.embedding)
        self.final_norm = state["model.norm.weight"]
        self.layers = [self._layer(state, index) for index in range(self.geometry.layers)]
        rotary = model.model.rotary_emb
        self.inverse_frequency = rotary.inv_freq.detach().float()
        self.rope_scale = float(rotary.attention_scaling)
        self._on_processor = runs_here(self.device, self.dtype)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def sites(self) -> list[Site]:
        """All fused linears, layer by layer."""
        return [site for layer in self.layers for site in layer.sites]

    def _layer(self, state: dict[str, torch.Tensor], index: int) -> Layer:
        prefix = f"model.layers.{index}."

        def site(group: str, *modules: str) -> Site:
            weights = [state[f"{prefix}{group}.{m}.weight"] for m in modules]
            biases = [state.get(f"{prefix}{group}.{m}.bias") for m in modules]
            given = [b for b in biases if b is not None]
            if given and len(given) != len(biases):
                raise ModelError(f"layer {index}: {group} has a bias on some of {', '.join(modules)} only")
            starts = [sum(w.shape[0] for w in weights[:i]) for i in range(len(weights))]
            parts = tuple(Part(m, s, w.shape[0]) for m, s, w in zip(modules, starts, weights, strict=True))
            return Site(index, torch.cat(weights), torch.cat(given) if given else None, parts)

        return Layer(
            qkv=site("self_attn", "q_proj", "k_proj", "v_proj"),
            output=site("self_attn", "o_proj"),
            gate_up=site("mlp", "gate_proj", "up_proj"),
            down=site("mlp", "down_proj"),
            attention_norm=state[f"{prefix}input_layernorm.weight"],
            mlp_norm=state[f"{prefix}post_attention_layernorm.weight"],
            query_norm=state.get(f"{prefix}self_attn.q_norm.weight"),
            key_norm=state.get(f"{prefix}self_attn.k_norm.weight"),
        )

    def hidden_states(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, attend: Attention, lora: Lora | None
    ) -> torch.Tensor:
        """Final hidden states `[T, hidden]` of int64 tokens at int64 positions (both `[T]`)."""
        g = self.geometry
        cos_TD, sin_TD = self._rope(positions_T)
        hidden = F.embedding(tokens_T, self.embedding)
        if torch.is_grad_enabled():
            hidden.requires_grad_()  # nothing else does: the base is frozen, LoRA gradients are written in place
        for index, layer in enumerate(self.layers):
            x = self._norm(hidden, layer.attention_norm)
            qkv = self._linear(layer.qkv, x, lora).view(-1, g.heads + 2 * g.kv_heads, g.head_dim)
            query, key, value = self._turned(layer, qkv, cos_TD, sin_TD)
            hidden = hidden + self._linear(layer.output, attend(index, query, key, value), lora)
            x = self._norm(hidden, layer.mlp_norm)
            hidden = hidden + self._linear(layer.down, self._activated(self._linear(layer.gate_up, x, lora)), lora)
        return self._norm(hidden, self.final_norm)

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Logits `[N, vocabulary]` in the model's dtype."""
        return F.linear(hidden_NH, self.head)

    def _linear(self, site: Site, x_TI: torch.Tensor, lora: Lora | None) -> torch.Tensor:
        y_TO = F.linear(x_TI, site.weight, site.bias)
        return y_TO if lora is None else lora.add(site, x_TI, y_TO)

    def _turned(
        self, layer: Layer, qkv_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value, the first two rotated."""
        g = self.geometry
        sizes, half = [g.heads, g.kv_heads, g.kv_heads], g.head_dim // 2
        plain = layer.query_norm is None or layer.key_norm is None
        if plain and self._on_processor:
            cos_TF, sin_TF = (t[:, 0, :half].float().contiguous() for t in (cos_T1D, sin_T1D))
            qkv_THD = cpu_layers.rotate_(qkv_THD, g.heads + g.kv_heads, cos_TF, sin_TF)
            query, key, value = qkv_THD.split(sizes, dim=1)
            return query, key, value
        query, key, value = qkv_THD.split(sizes, dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)
        return _rotate(query, cos_T1D, sin_T1D), _rotate(key, cos_T1D, sin_T1D), value

    def _activated(self, gate_up_TI: torch.Tensor) -> torch.Tensor:
        if self._on_processor:
            return cpu_layers.silu_product(gate_up_TI)
        gate, up = gate_up_TI.chunk(2, dim=-1)
        return F.silu(gate) * up

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self._on_processor and x.dim() == 2:
            return cpu_layers.rms_norm(x, weight, self.geometry.rms_epsilon)
        return F.rms_norm(x, weight.shape, weight, self.geometry.rms_epsilon)

    def _rope(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions_T.float()[:, None] * self.inverse_frequency[None, :]
        angles_TD = torch.cat((angles, angles), dim=-1)
        cos, sin = angles_TD.cos() * self.rope_scale, angles_TD.sin() * self.rope_scale
        return cos.to(self.dtype)[:, None, :], sin.to(self.dtype)[:, None, :]


def _rotate(x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, half-split form (Su et al. 2021, as in Llama)."""
    first, second = x_THD.chunk(2, dim=-1)
    return x_THD * cos_T1D + torch.cat((-second, first), dim=-1) * sin_T1D
