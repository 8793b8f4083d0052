"""Fake (meta) kernels: output shapes and dtypes for tracing, with the shape and dtype checks of the real ones.

Sizes may be symbolic: a check on one that is unknown becomes a guard, and none looks at data.
"""

from __future__ import annotations

import torch

from . import _library  # noqa: F401

BLOCK = 16
MAX_HEAD_DIM = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
RECIPES = ("cudnn", "fp4", "fp4_qk")
INFERENCE_RECIPES = ("fp4", "fp4_qk")


def _check(condition, message) -> None:
    if not condition:
        raise ValueError(message())


def _name(dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(sizes) -> str:
    return str(tuple(sizes))


def _check_dtype(op, name, x) -> None:
    _check(
        x.dtype in DTYPES,
        lambda: f"{op}: {name} has dtype {_name(x.dtype)}, takes bfloat16, float16 or float32",
    )


def _check_dtype_is(op, name, x, dtype) -> None:
    _check(x.dtype == dtype, lambda: f"{op}: {name} has dtype {_name(x.dtype)}, takes {_name(dtype)}")


def _check_like(op, name, x, sizes, like, like_name) -> None:
    _check(
        x.dtype == like.dtype,
        lambda: f"{op}: {name} has dtype {_name(x.dtype)}, takes {_name(like.dtype)}, that of {like_name}",
    )
    _check_device(op, name, x, like, like_name)
    _check_shape(op, name, x, sizes)


def _check_device(op, name, x, like, like_name) -> None:
    _check(
        x.device == like.device,
        lambda: f"{op}: {name} is on {x.device}, takes {like.device}, where {like_name} is",
    )


def _check_shape(op, name, x, sizes) -> None:
    _check(
        x.dim() == len(sizes) and all(a == b for a, b in zip(x.shape, sizes, strict=True)),
        lambda: f"{op}: {name} has shape {_shape(x.shape)}, takes {_shape(sizes)}",
    )


def _check_row_values(op, name, x, q, dtype) -> None:
    _check_dtype_is(op, name, x, dtype)
    _check_device(op, name, x, q, "q")
    _check_shape(op, name, x, q.shape[:3])


def _check_4d(op, name, x) -> None:
    _check(
        x.dim() == 4,
        lambda: f"{op}: {name} has {x.dim()} dimensions, takes 4: (batch, heads, sequence, head_dim)",
    )


def _check_head_dim(op, name, head_dim) -> None:
    _check(
        head_dim > 0 and head_dim % 16 == 0 and head_dim <= MAX_HEAD_DIM,
        lambda: f"{op}: {name} has head_dim {head_dim}, takes a multiple of 16 up to {MAX_HEAD_DIM}",
    )


def _check_attention(op, q, k, v, recipe="fp4") -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_4d(op, name, x)
        _check_dtype(op, name, x)
        _check_like(op, name, x, x.shape, q, "q")
    batch, heads_q, _, head_dim = q.shape
    heads_kv, seq_k = k.shape[1:3]
    _check_head_dim(op, "q", head_dim)
    for name, x in (("k", k), ("v", v)):
        _check_shape(op, name, x, (batch, heads_kv, seq_k, head_dim))
    _check(
        heads_q % heads_kv == 0 if heads_kv > 0 else heads_q == 0,
        lambda: (
            f"{op}: k has {heads_kv} heads and q {heads_q}, "
            "takes a number of kv heads that divides the query heads"
        ),
    )
    _check(recipe in RECIPES, lambda: f"{op}: recipe is '{recipe}', takes 'cudnn', 'fp4' or 'fp4_qk'")


def _check_backward(op, grad_out, q, k, v, lse, recipe, row_exponent) -> None:
    _check_attention(op, q, k, v, recipe)
    _check_like(op, "grad_out", grad_out, q.shape, q, "q")
    _check_row_values(op, "lse", lse, q, torch.float32)
    if row_exponent is not None:
        _check_row_values(op, "row_exponent", row_exponent, q, torch.int32)


def _along_rows(op, axis, dims) -> bool:
    _check(
        -dims <= axis < dims and axis % dims >= dims - 2,
        lambda: f"{op}: axis is {axis} for a tensor of {dims} dimensions, takes -1 or -2",
    )
    return axis % dims == dims - 2 and dims > 1


def _check_dims(op, name, x) -> None:
    _check(1 <= x.dim() <= 4, lambda: f"{op}: {name} has {x.dim()} dimensions, takes 1 to 4")


def _check_global_scale(op, global_scale, x) -> None:
    if global_scale is None:
        return
    _check_dtype_is(op, "global_scale", global_scale, torch.float32)
    _check_device(op, "global_scale", global_scale, x, "the input")
    _check(
        global_scale.numel() == 1,
        lambda: f"{op}: global_scale has shape {_shape(global_scale.shape)}, takes one element",
    )


def _ceil_div(a, b):
    return (a + b - 1) // b


def _scales_shape(leading, lines, blocks, tiled, dims):
    if tiled:
        return [*leading, _ceil_div(lines, 128) * 128, _ceil_div(blocks, 4) * 4]
    return [*leading, lines, blocks] if dims > 1 else [blocks]


@torch.library.register_fake("attn_qat::fake_quantize")
def _fake_quantize(x, axis=-1, global_scale=None):
    _check_dtype("fake_quantize", "x", x)
    _check_dims("fake_quantize", "x", x)
    _along_rows("fake_quantize", axis, x.dim())
    _check_global_scale("fake_quantize", global_scale, x)
    return x.new_empty(x.shape)


@torch.library.register_fake("attn_qat::quantize")
def _quantize(x, axis=-1, global_scale=None, tiled_scales=False):
    op, dims = "quantize", x.dim()
    _check_dtype(op, "x", x)
    _check_dims(op, "x", x)
    rows_axis = _along_rows(op, axis, dims)
    rows, cols = (x.shape[-2] if dims > 1 else 1), x.shape[-1]
    lines, length = (cols, rows) if rows_axis else (rows, cols)
    _check(
        length % 2 == 0, lambda: f"{op}: x has length {length} along the quantised axis, takes an even one"
    )
    _check_global_scale(op, global_scale, x)
    leading = x.shape[:-2]
    data = x.new_empty([*leading, lines, length // 2] if dims > 1 else [length // 2], dtype=torch.uint8)
    scales = _scales_shape(leading, lines, _ceil_div(length, BLOCK), tiled_scales, dims)
    return data, x.new_empty(scales, dtype=torch.float8_e4m3fn)


@torch.library.register_fake("attn_qat::dequantize")
def _dequantize(data, scales, dtype, axis=-1, global_scale=None, tiled_scales=False):
    op, dims = "dequantize", data.dim()
    _check_dtype_is(op, "data", data, torch.uint8)
    _check_dtype_is(op, "scales", scales, torch.float8_e4m3fn)
    _check_device(op, "scales", scales, data, "data")
    _check_dims(op, "data", data)
    rows_axis = _along_rows(op, axis, dims)
    leading, lines, length = data.shape[:-2], (data.shape[-2] if dims > 1 else 1), data.shape[-1] * 2
    _check_shape(
        op, "scales", scales, _scales_shape(leading, lines, _ceil_div(length, BLOCK), tiled_scales, dims)
    )
    _check_global_scale(op, global_scale, data)
    _check(dtype in DTYPES, lambda: f"{op}: dtype is {_name(dtype)}, takes bfloat16, float16 or float32")
    if dims == 1:
        return data.new_empty([length], dtype=dtype)
    return data.new_empty([*leading, length, lines] if rows_axis else [*leading, lines, length], dtype=dtype)


@torch.library.register_fake("attn_qat::forward")
def _forward(q, k, v, softmax_scale, is_causal, recipe="cudnn", deterministic=True):
    _check_attention("forward", q, k, v, recipe)
    rows = q.shape[:3]
    return (
        q.new_empty(q.shape),
        q.new_empty(q.shape),
        q.new_empty(rows, dtype=torch.float32),
        q.new_empty(rows, dtype=torch.int32),
    )


def _check_infer(op, q, k, v, recipe) -> None:
    _check(recipe in INFERENCE_RECIPES, lambda: f"{op}: recipe is '{recipe}', takes 'fp4' or 'fp4_qk'")
    _check_attention(op, q, k, v, recipe)


@torch.library.register_fake("attn_qat::infer")
def _infer(q, k, v, softmax_scale, is_causal, recipe="fp4"):
    _check_infer("infer", q, k, v, recipe)
    return q.new_empty(q.shape)


@torch.library.register_fake("attn_qat::infer_with_lse")
def _infer_with_lse(q, k, v, softmax_scale, is_causal, recipe="fp4"):
    _check_infer("infer_with_lse", q, k, v, recipe)
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("attn_qat::preprocess")
def _preprocess(high_precision_out, grad_out):
    op, x = "preprocess", high_precision_out
    _check_4d(op, "high_precision_out", x)
    _check_dtype(op, "high_precision_out", x)
    _check_like(op, "grad_out", grad_out, x.shape, x, "high_precision_out")
    _check_head_dim(op, "high_precision_out", x.shape[3])
    return grad_out.new_empty(x.shape[:3], dtype=torch.float32)


@torch.library.register_fake("attn_qat::backward_dq")
def _backward_dq(grad_out, q, k, v, lse, delta, softmax_scale, is_causal, recipe="cudnn", row_exponent=None):
    _check_backward("backward_dq", grad_out, q, k, v, lse, recipe, row_exponent)
    _check_row_values("backward_dq", "delta", delta, q, torch.float32)
    return q.new_empty(q.shape)


@torch.library.register_fake("attn_qat::backward_dkdv")
def _backward_dkdv(
    grad_out, q, k, v, lse, delta, softmax_scale, is_causal, recipe="cudnn", row_exponent=None
):
    _check_backward("backward_dkdv", grad_out, q, k, v, lse, recipe, row_exponent)
    _check_row_values("backward_dkdv", "delta", delta, q, torch.float32)
    return k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.register_fake("attn_qat::backward")
def _backward(
    grad_out, q, k, v, high_precision_out, lse, softmax_scale, is_causal, recipe="cudnn", row_exponent=None,
    deterministic=True,
):
    _check_backward("backward", grad_out, q, k, v, lse, recipe, row_exponent)
    _check_like("backward", "high_precision_out", high_precision_out, q.shape, q, "q")
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.register_fake("attn_qat::backward.out")
def _backward_out(
    grad_out,
    q,
    k,
    v,
    high_precision_out,
    lse,
    softmax_scale,
    is_causal,
    recipe,
    row_exponent,
    workspace,
    *,
    dq,
    dk,
    dv,
    deterministic=True,
):
    op = "backward.out"
    _check_backward(op, grad_out, q, k, v, lse, recipe, row_exponent)
    _check_like(op, "high_precision_out", high_precision_out, q.shape, q, "q")
    _check_like(op, "dq", dq, q.shape, q, "q")
    _check_like(op, "dk", dk, k.shape, k, "k")
    _check_like(op, "dv", dv, v.shape, v, "v")
    _check_dtype_is(op, "workspace", workspace, torch.uint8)
    _check_device(op, "workspace", workspace, q, "q")
