"""Differentiable attention: the autograd formulas of the operators, and `attention` on top of them."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .recipe import Recipe


def _setup_forward(ctx, inputs, output) -> None:
    q, k, v, softmax_scale, is_causal, recipe, deterministic = inputs
    _, high_precision_out, lse, row_exponent = output
    ctx.mark_non_differentiable(high_precision_out, lse, row_exponent)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, high_precision_out, lse, row_exponent)
    ctx.arguments = (softmax_scale, is_causal, recipe)
    ctx.deterministic = deterministic


def _backward_of_forward(ctx, grad_out, *_):
    if grad_out is None:
        return (None,) * 7
    q, k, v, high_precision_out, lse, row_exponent = ctx.saved_tensors
    # A gradient may arrive expanded or transposed; the operator takes rows it can read.
    dq, dk, dv = torch.ops.attn_qat.backward(
        grad_out.contiguous(), q, k, v, high_precision_out, lse, *ctx.arguments, row_exponent, ctx.deterministic
    )
    return dq, dk, dv, None, None, None, None


torch.library.register_autograd("attn_qat::forward", _backward_of_forward, setup_context=_setup_forward)


def _straight_through(ctx, grad_out):
    return grad_out, None, None


def _setup_nothing(ctx, inputs, output) -> None:
    pass


torch.library.register_autograd("attn_qat::fake_quantize", _straight_through, setup_context=_setup_nothing)


def _refuse_gradient(op: str):
    def backward(ctx, *_):
        raise NotImplementedError(
            f"attn_qat::{op} has no gradient: attention can be differentiated once only"
        )

    return backward


for _op in ("backward", "backward_dq", "backward_dkdv", "preprocess"):
    torch.library.register_autograd(f"attn_qat::{_op}", _refuse_gradient(_op), setup_context=_setup_nothing)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    recipe: str | Recipe = Recipe.FP4,
    deterministic: bool = True,
) -> Tensor:
    """Attention as FP4 tensor cores compute it, differentiable in q, k and v.

    q: (B, Hq, Sq, D). k, v: (B, Hkv, Skv, D) with Hq a multiple of Hkv. Returns (B, Hq, Sq, D) in q's dtype.
    softmax_scale: defaults to D ** -0.5. is_causal aligns bottom-right when Sq != Skv.
    Gradients pass the quantisation unchanged (straight-through); the backward uses the same recipe.
    deterministic: gradients have the same bits on every run; see `backward`.
    Under autocast, q, k and v are cast to the autocast dtype. Raises ValueError for anything it does not take.
    """
    device = q.device.type
    if not q.is_meta and torch.is_autocast_enabled(device):  # meta has no autocast
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    return ops.forward(q, k, v, softmax_scale, is_causal, recipe, deterministic)[0]
