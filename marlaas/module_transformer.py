"""The decoder of every other family: transformers' own module, with our attention and our multi-LoRA linears in it.

The module sees all sequences as one, `[1, T]`. Its attention calls come back to the pass's own, which knows where
sequences begin and holds their keys and values; everything else in a decoder works token by token. That a family is
one of these is not taken on trust: a probe of two short sequences must give the logits that transformers gives alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from marlaas.attention import Block, BlockAttention
from marlaas.errors import ModelError
from marlaas.specs import TARGETS
from marlaas.transformer import Attention, Geometry, Lora, Part, Site, longest_sequence, module_path

_NAME = "marlaas"  # of our attention among transformers'
_PROBE = (7, 5)  # tokens of the two sequences
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # of the logits' norm
_LOW_PRECISION = 0.05
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
# Options of an attention call that change nothing here; any other that is set would.
_KNOWN_OPTIONS = {"dropout", "sliding_window", "is_causal", "position_ids", "use_cache"}


@dataclass(frozen=True)
class _Call:
    """One attention call of a probe: the layer, `[heads, D]` of query, key and value, and what it asked for."""

    layer: int
    query: torch.Size
    key: torch.Size
    value: torch.Size
    dtype: torch.dtype
    options: dict[str, Any]


@dataclass
class _Pass:
    tokens: int
    attend: Attention
    lora: Lora | None
    calls: list[_Call] | None = None


_PASS: ContextVar[_Pass] = ContextVar("pass")


@contextmanager
def _running(what: _Pass) -> Iterator[None]:
    token = _PASS.set(what)
    try:
        yield
    finally:
        _PASS.reset(token)


class _AdaptedLinear(nn.Linear):
    """A linear of the module, on the same weight, to whose output the pass's LoRA is added."""

    def __init__(self, linear: nn.Linear, site: Site) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.site = site

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_TI, lora = x.flatten(0, -2), _PASS.get().lora
        y_TO = F.linear(x_TI, self.weight, self.bias)
        if lora is not None:
            assert len(x_TI) == _PASS.get().tokens
            y_TO = lora.add(self.site, x_TI, y_TO)
        return y_TO.unflatten(0, x.shape[:-1])


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers' AttentionInterface wants it: `[1, heads, T, D]` in, `[1, T, heads, D]` out."""
    q_THD, k_TKD, v_TKD = (t.squeeze(0).transpose(0, 1).contiguous() for t in (query, key, value))
    current = _PASS.get()
    if current.calls is not None:
        asked = options | {"attention_mask": attention_mask}
        asked = {name: value for name, value in asked.items() if value is not None and value is not False}
        shapes = q_THD.shape[1:], k_TKD.shape[1:], v_TKD.shape[1:]
        current.calls.append(_Call(module.layer_idx, *shapes, q_THD.dtype, asked))
    # The pass's attention scales by head_dim ** -0.5; what the family does otherwise goes into the query.
    factor = 1.0 if scaling is None else scaling * math.sqrt(q_THD.shape[-1])
    if not math.isclose(factor, 1.0, rel_tol=1e-6):
        q_THD = q_THD * factor
    out = current.attend(module.layer_idx, q_THD, k_TKD, v_TKD)
    return out.view(1, *q_THD.shape), None


class ModuleTransformer:
    """The decoder that transformers' module computes."""

    def __init__(self, model: Any) -> None:
        """Takes over a transformers causal LM and changes it. Raises ModelError for a family that cannot run here."""
        from transformers import AttentionInterface

        self._kind = model.config.model_type
        _check_config(model.config)
        _check_structure(model)
        self._model = model.requires_grad_(False).eval()
        linear = _head(model)
        self.head = linear.weight.detach()
        self._head_bias = None if linear.bias is None else linear.bias.detach()
        # On the hidden states, so that the head stays a plain product for whoever needs its derivative.
        self._hidden_scale = _logits_scale(model.config)
        self._last_position = model.config.max_position_embeddings - 1
        probe = _probe_tokens(len(self.head), self.head.device)
        with torch.no_grad():
            expected = torch.cat([model(input_ids=tokens[None], use_cache=False).logits[0] for tokens in probe])
        AttentionInterface.register(_NAME, _attention)
        model.set_attn_implementation(_NAME)
        self.sites = _adapt(model)
        model.get_input_embeddings().register_forward_hook(_begin_gradient)
        self.geometry = self._probed(probe, expected)
        self._last_position = self.geometry.max_positions - 1

    @property
    def device(self) -> torch.device:
        return self.head.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.dtype

    def hidden_states(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, attend: Attention, lora: Lora | None
    ) -> torch.Tensor:
        """Final hidden states `[T, hidden]` of int64 tokens at int64 positions (both `[T]`)."""
        return self._run(_Pass(len(tokens_T), attend, lora), tokens_T, positions_T)

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Logits `[N, vocabulary]` in the model's dtype."""
        return F.linear(hidden_NH, self.head, self._head_bias)

    def _run(self, what: _Pass, tokens_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        # Padding may lie beyond the last position, where rotary frequencies could change for all tokens.
        positions_T = positions_T.clamp(max=self._last_position)
        with _running(what):
            out = self._model.model(input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False)
        hidden_TH = out[0].squeeze(0)
        return hidden_TH if self._hidden_scale == 1 else hidden_TH * self._hidden_scale

    @torch.no_grad()
    def _probed(self, probe: list[torch.Tensor], expected: torch.Tensor) -> Geometry:
        """The sizes, as the module's attention calls show them."""
        attend = BlockAttention([Block(1, len(tokens)) for tokens in probe])
        calls: list[_Call] = []
        tokens_T = torch.cat(probe)
        positions_T = torch.cat([torch.arange(len(tokens), device=tokens_T.device) for tokens in probe])
        try:
            got = self.logits(self._run(_Pass(len(tokens_T), attend, None, calls), tokens_T, positions_T)).float()
        except Exception as error:
            raise _refused(self._kind, f"its module fails here: {type(error).__name__}: {error}") from error
        geometry = self._geometry(calls)
        difference = float((got - expected.float()).norm() / expected.float().norm())
        if not difference <= _TOLERANCE.get(self.dtype, _LOW_PRECISION):
            raise _refused(self._kind, f"its logits here differ from transformers' by {difference:.1%}")
        return geometry

    def _geometry(self, calls: list[_Call]) -> Geometry:
        config = self._model.config
        layers = list(range(config.num_hidden_layers))
        if [call.layer for call in calls] != layers:
            raise _refused(
                self._kind, f"of its {len(layers)} layers, {len(calls)} attend through transformers' AttentionInterface"
            )
        for call in calls:
            odd = sorted(call.options.keys() - _KNOWN_OPTIONS)
            if odd:
                raise _refused(self._kind, f"its attention takes {', '.join(odd)}")
        first = calls[0]
        if any((c.query, c.key, c.value, c.dtype) != (first.query, first.key, first.key, self.dtype) for c in calls):
            raise _refused(self._kind, "queries, keys and values differ between layers, in head size or in type")
        windows = [call.options["sliding_window"] for call in calls if call.options.get("sliding_window")]
        vocabulary, hidden = self.head.shape
        return Geometry(
            vocabulary=vocabulary,
            hidden=hidden,
            layers=len(layers),
            heads=first.query[0],
            kv_heads=first.key[0],
            head_dim=first.query[1],
            max_positions=min([longest_sequence(config), *windows]),
        )


def check_family(config: Any) -> None:
    """Raises ModelError if the transformers config is of a family that cannot run; reads no weights."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _refused(config.model_type, "it is no causal language model of transformers")
    _check_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    _check_structure(model)


def _refused(kind: str, reason: str) -> ModelError:
    return ModelError(f"model_type {kind!r} is not supported: {reason}")


def _check_config(config: Any) -> None:
    for name in _CAPS:
        if getattr(config, name, None) is not None:
            raise _refused(config.model_type, f"{name} {getattr(config, name)}; allowed is none")
    for name in ("num_hidden_layers", "max_position_embeddings"):
        if getattr(config, name, None) is None:
            raise _refused(config.model_type, f"its configuration has no {name}")


def _check_structure(model: Any) -> None:
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):
        raise _refused(model.config.model_type, "it mixes neighbouring tokens in convolutions")
    _head(model)
    _linears(model)


def _head(model: Any) -> nn.Linear:
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise _refused(model.config.model_type, "its head is no plain linear")
    if head.bias is not None and _logits_scale(model.config) != 1:
        raise _refused(model.config.model_type, "its head has a bias and a scale")
    return head


def _logits_scale(config: Any) -> float:
    """What the logits are multiplied by: Cohere's logit_scale, Granite's 1 / logits_scaling."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)


def _linears(model: Any) -> list[tuple[int, str, nn.Linear]]:
    """The linears that take LoRA, layer by layer: (layer, module, linear).

    PEFT finds modules by the end of their names. So a name counts only if all that have it are plain linears in the
    places where the engine looks for them.
    """
    layers = range(model.config.num_hidden_layers)
    named = dict(model.named_modules())
    found: list[tuple[int, str, nn.Linear]] = []
    for target in TARGETS:
        places = {module_path(layer, target): layer for layer in layers}
        modules = {path: module for path, module in named.items() if re.search(rf"(^|\.){target}$", path)}
        if all(path in places and type(module) is nn.Linear for path, module in modules.items()):
            found += [(places[path], target, module) for path, module in modules.items()]
    if not found:
        raise _refused(model.config.model_type, f"no plain linear is one of {', '.join(TARGETS)} in each of its layers")
    return sorted(found, key=lambda entry: (entry[0], TARGETS.index(entry[1])))


def _adapt(model: Any) -> list[Site]:
    """Puts linears that add LoRA in the place of those that can take it."""
    sites = []
    for layer, name, linear in _linears(model):
        bias = None if linear.bias is None else linear.bias.detach()
        site = Site(layer, linear.weight.detach(), bias, (Part(name, 0, linear.out_features),))
        model.set_submodule(module_path(layer, name), _AdaptedLinear(linear, site))
        sites.append(site)
    return sites


def _begin_gradient(module: Any, args: Any, hidden: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        hidden.requires_grad_()  # nothing else does: the base is frozen, LoRA gradients are written in place


def _probe_tokens(vocabulary: int, device: torch.device) -> list[torch.Tensor]:
    """Two sequences of arbitrary tokens."""
    tokens = (torch.arange(sum(_PROBE), device=device) * 7919 + 11) % vocabulary
    return list(tokens.split(_PROBE))
