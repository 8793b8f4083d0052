"""Differentiable attention: the autograd formulas of the operators, and `attention` on top of them."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .recipe import Recipe

ROW_ALIGNMENT = 16  # bytes


def _setup_forward(ctx, inputs, output) -> None:
    q, k, v, softmax_scale, is_causal, recipe, deterministic = inputs
    _, high_precision_out, lse, row_exponent = output
    ctx.mark_non_differentiable(high_precision_out, lse, row_exponent)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, high_precision_out, lse, row_exponent)
    ctx.arguments = (softmax_scale, is_causal, recipe)
    ctx.deterministic = deterministic


def _readable(grad_out: Tensor) -> Tensor:
    """A gradient arrives as other code left it: expanded, transposed, or a view from anywhere in a buffer.

    It is copied where the operator cannot read it, and where that cannot be told (subclasses, so also where it
    is traced). Compiled code may move it again afterwards; at an address that is no multiple of 16 bytes the
    operator then raises.
    """
    aligned = ROW_ALIGNMENT // grad_out.element_size()
    starts_well = grad_out.storage_offset() % aligned == 0
    if type(grad_out) is Tensor and starts_well and grad_out.stride(3) == 1:
        rows = zip(grad_out.stride()[:3], grad_out.shape, strict=False)
        if all(size == 1 or (stride > 0 and stride % aligned == 0) for stride, size in rows):
            return grad_out
    return grad_out.contiguous() if starts_well else grad_out.clone(memory_format=torch.contiguous_format)


def _backward_of_forward(ctx, grad_out, *_):
    if grad_out is None:
        return (None,) * 7
    q, k, v, high_precision_out, lse, row_exponent = ctx.saved_tensors
    dq, dk, dv = torch.ops.attn_qat.backward(
        _readable(grad_out), q, k, v, high_precision_out, lse, *ctx.arguments, row_exponent, ctx.deterministic
    )
    return dq, dk, dv, None, None, None, None


torch.library.register_autograd("attn_qat::forward", _backward_of_forward, setup_context=_setup_forward)


def _setup_fake_quantize(ctx, inputs, output) -> None:
    if any(ctx.needs_input_grad[2:]):
        raise ValueError(
            "fake_quantize: global_scale requires grad, takes one that does not: it would get none"
        )


def _straight_through(ctx, grad_out):
    return grad_out, None, None


torch.library.register_autograd(
    "attn_qat::fake_quantize", _straight_through, setup_context=_setup_fake_quantize
)


def _setup_nothing(ctx, inputs, output) -> None:
    pass


def _refuse_gradient(op: str, why: str):
    def backward(ctx, *_):
        raise NotImplementedError(f"attn_qat::{op} has no gradient: {why}")

    return backward


for _why, _names in (
    (
        "attention can be differentiated once only",
        ("backward", "backward_dq", "backward_dkdv", "preprocess"),
    ),
    ("fake_quantize has one", ("quantize", "dequantize")),
    ("train with attn_qat.attention and the recipe of the pv_mode", ("infer", "infer_with_lse")),
):
    for _op in _names:
        torch.library.register_autograd(
            f"attn_qat::{_op}", _refuse_gradient(_op, _why), setup_context=_setup_nothing
        )


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
    On a CPU bfloat16, float16 or float32, D a multiple of 16 up to 256; on CUDA bfloat16 or float16, D 64 or
    128. Under autocast, q, k and v of these dtypes are cast to the autocast dtype. Raises ValueError for anything
    it does not take and NotImplementedError where there is no kernel.
    """
    q, k, v = ops.autocast(q, k, v)
    if softmax_scale is None:
        softmax_scale = ops.default_softmax_scale(q)
    return ops.forward(q, k, v, softmax_scale, is_causal, recipe, deterministic)[0]
