"""A layer's pieces between its matrix products, differentiable, by the kernels for processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from marlaas.cpu_kernels import as_array


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / rms(x) * weight, for rows of x `[T, H]`; the weight has no gradient."""
    return _RmsNorm.apply(x_TH, weight_H, epsilon)


def rotate_(x_THD: torch.Tensor, heads: int, cos_TF: torch.Tensor, sin_TF: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of the first heads, in place; cos and sin: fp32 `[T, D / 2]`."""
    return _Rotate.apply(x_THD, heads, cos_TF, sin_TF)


def silu_product(gate_up_TI: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up `[T, I]` of `[T, 2 I]`."""
    return _SiluProduct.apply(gate_up_TI)


class BranchAttention:
    """Attention over stretches of a flat batch: int64 `[S, 4]`, begin and end, and begin and end of what else it sees.

    Each token sees its stretch up to itself, and the whole of the other tokens. Tokens of no stretch get zeros.
    """

    def __init__(self, stretches_S4: np.ndarray) -> None:
        self._stretches = stretches_S4

    def __call__(
        self, layer: int, query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor
    ) -> torch.Tensor:
        return _Attention.apply(query_THD, key_TKD, value_TKD, self._stretches).flatten(1)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: torch.Tensor, weight_H: torch.Tensor, epsilon: float) -> torch.Tensor:
        from marlaas_kernels.cpu import gradients

        x_TH = x_TH.contiguous()
        out_TH, factor_T = torch.empty_like(x_TH), torch.empty(len(x_TH))
        gradients.rms_norm(as_array(x_TH), as_array(weight_H), epsilon, as_array(out_TH), as_array(factor_T))
        ctx.save_for_backward(x_TH, weight_H, factor_T)
        return out_TH

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        from marlaas_kernels.cpu import gradients

        x_TH, weight_H, factor_T = ctx.saved_tensors
        dx_TH, dy_TH = torch.empty_like(x_TH), grads[0].contiguous()
        gradients.rms_norm_backward(*map(as_array, (dy_TH, x_TH, weight_H, factor_T, dx_TH)))
        return dx_TH, None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: torch.Tensor, heads: int, cos_TF: torch.Tensor, sin_TF: torch.Tensor) -> torch.Tensor:
        from marlaas_kernels.cpu import gradients

        ctx.mark_dirty(x_THD)
        ctx.save_for_backward(cos_TF, sin_TF)
        ctx.heads = heads
        gradients.rotate_(as_array(x_THD), heads, as_array(cos_TF), as_array(sin_TF), 1.0)
        return x_THD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        from marlaas_kernels.cpu import gradients

        cos_TF, sin_TF = ctx.saved_tensors
        dx_THD = grads[0].clone(memory_format=torch.contiguous_format)
        gradients.rotate_(as_array(dx_THD), ctx.heads, as_array(cos_TF), as_array(sin_TF), -1.0)
        return dx_THD, None, None, None


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_TI: torch.Tensor) -> torch.Tensor:
        from marlaas_kernels.cpu import gradients

        gate_up_TI = gate_up_TI.contiguous()
        out_TI = gate_up_TI.new_empty(len(gate_up_TI), gate_up_TI.shape[1] // 2)
        gradients.silu_product(as_array(gate_up_TI), as_array(out_TI))
        ctx.save_for_backward(gate_up_TI)
        return out_TI

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        from marlaas_kernels.cpu import gradients

        (gate_up_TI,) = ctx.saved_tensors
        d_TI, dy_TI = torch.empty_like(gate_up_TI), grads[0].contiguous()
        gradients.silu_product_backward(as_array(dy_TI), as_array(gate_up_TI), as_array(d_TI))
        return d_TI


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, stretches_S4: np.ndarray
    ) -> torch.Tensor:
        from marlaas_kernels.cpu import branches

        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        out_THD, logsum_HT = torch.zeros_like(query), torch.zeros(query.shape[1], query.shape[0])
        given = as_array(query), as_array(key), as_array(value)
        branches.attend(*given, stretches_S4, as_array(out_THD), as_array(logsum_HT))
        ctx.save_for_backward(query, key, value, out_THD, logsum_HT)
        ctx.stretches_S4 = stretches_S4
        return out_THD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        from marlaas_kernels.cpu import branches

        query, key, value, out_THD, logsum_HT = ctx.saved_tensors
        wanted = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        given = map(as_array, (grads[0].contiguous(), query, key, value, out_THD, logsum_HT))
        branches.attend_backward(*given, ctx.stretches_S4, *map(as_array, wanted))
        return *wanted, None
