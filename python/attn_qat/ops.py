"""Functional forms of `torch.ops.attn_qat`: the same operators with defaults, docstrings and the Recipe type.

Tensors are (batch, heads, sequence, head_dim). Strides are free except that the head dimension is contiguous and rows
start at multiples of 16 bytes, so a (batch, sequence, heads, head_dim) tensor passes as `x.transpose(1, 2)`.
On a CPU: bfloat16, float16, float32, head_dim a multiple of 16 up to 256. Attention on CUDA: bfloat16 and float16,
head_dim 64 or 128. Bad arguments raise ValueError, a problem or a GPU without a kernel NotImplementedError.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _fake, _library  # noqa: F401  (loading the library and its fakes comes first)
from .recipe import Recipe

_ops = torch.ops.attn_qat


def _call(op, *args, **kwargs):
    """op(...), with the library's "no CUDA kernel" errors as NotImplementedError: C++ can only raise RuntimeError.

    Forward-mode tangents, which the operators would lose, are refused.
    """
    if torch.compiler.is_compiling():
        return op(*args, **kwargs)
    for x in args:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(f"{op} has no forward-mode derivative, takes tensors without a tangent")
    try:
        return op(*args, **kwargs)
    except RuntimeError as error:
        if "no CUDA kernel" in str(error):
            raise NotImplementedError(str(error)) from None
        raise


def autocast(*operands: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, floating-point operands in its dtype; the operator refuses what autocast does not cast."""
    device = operands[0].device.type
    if operands[0].is_meta or not torch.is_autocast_enabled(device):  # meta has no autocast
        return operands
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.dtype in _fake.DTYPES else x for x in operands)


def default_softmax_scale(q: Tensor) -> float:
    """D ** -0.5; for a q that has no D anything: the operator says what is wrong with it."""
    return q.shape[3] ** -0.5 if q.dim() == 4 and q.shape[3] > 0 else 1.0


def fake_quantize(x: Tensor, axis: int = -1, global_scale: Tensor | None = None) -> Tensor:
    """x rounded to NVFP4 along `axis` (-1 or -2) and back, in x's dtype and shape, contiguous.

    Blocks of 16; a shorter tail counts as padded with zeros; a block with NaN or Inf becomes NaN.
    `global_scale`: one float32 value that multiplies when decoding. The gradient is the identity (straight-through),
    also for saturated values.
    """
    return _call(_ops.fake_quantize, x, axis, global_scale)


def quantize(
    x: Tensor, axis: int = -1, global_scale: Tensor | None = None, tiled_scales: bool = False
) -> tuple[Tensor, Tensor]:
    """Packed NVFP4 of x: (data uint8, scales float8_e4m3fn), with the quantised axis last in both.

    data: two codes a byte, the even index in the low nibble. scales: (..., ceil(n / 16)), or with `tiled_scales` the
    128x4 tiles that block-scaled GEMMs read, (..., ceil(rows / 128) * 128, ceil(n / 64) * 4), padding zero.
    """
    return _call(_ops.quantize, x, axis, global_scale, tiled_scales)


def dequantize(
    data: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    axis: int = -1,
    global_scale: Tensor | None = None,
    tiled_scales: bool = False,
) -> Tensor:
    """Values of packed NVFP4 in `dtype`; `axis` is where the quantised axis goes back to."""
    return _call(_ops.dequantize, data, scales, dtype, axis, global_scale, tiled_scales)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    is_causal: bool = False,
    recipe: str | Recipe = Recipe.FP4,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention with FP4 operands: (out, high_precision_out, lse, row_exponent).

    out: what the user sees. high_precision_out: the output with unquantised P, for the backward.
    lse: (B, Hq, Sq) float32, natural logarithm, -inf for a row that sees no key.
    row_exponent: (B, Hq, Sq) int32, the power of two that P was quantised against.
    Causal masks align bottom-right: query i sees keys j <= i + S_kv - S_q.
    deterministic: of the gradient, see `backward`; the forward always gives the same bits.
    """
    return _call(_ops.forward, q, k, v, softmax_scale, is_causal, str(recipe), deterministic)


def preprocess(high_precision_out: Tensor, grad_out: Tensor) -> Tensor:
    """delta = rowsum(high_precision_out * grad_out): (B, Hq, Sq) float32."""
    return _call(_ops.preprocess, high_precision_out, grad_out)


def backward_dq(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    softmax_scale: float,
    is_causal: bool = False,
    recipe: str | Recipe = Recipe.FP4,
    row_exponent: Tensor | None = None,
) -> Tensor:
    """dQ alone, the same bits as `backward` gives."""
    return _call(
        _ops.backward_dq, grad_out, q, k, v, lse, delta, softmax_scale, is_causal, str(recipe), row_exponent
    )


def backward_dkdv(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    softmax_scale: float,
    is_causal: bool = False,
    recipe: str | Recipe = Recipe.FP4,
    row_exponent: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(dK, dV) alone, the same bits as `backward` gives."""
    return _call(
        _ops.backward_dkdv, grad_out, q, k, v, lse, delta, softmax_scale, is_causal, str(recipe), row_exponent
    )


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    high_precision_out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    is_causal: bool = False,
    recipe: str | Recipe = Recipe.FP4,
    row_exponent: Tensor | None = None,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK, dV) from what `forward` returned for the same q, k, v, scale, mask and recipe.

    Without `row_exponent` the reference exponent comes from lse, which moves the floor under which P flushes to zero.
    The same bits on every run; with `deterministic` false the sums of dQ may be taken in any order, where a kernel
    gains from it (compute capability 9.0).
    """
    return _call(
        _ops.backward,
        grad_out,
        q,
        k,
        v,
        high_precision_out,
        lse,
        softmax_scale,
        is_causal,
        str(recipe),
        row_exponent,
        deterministic,
    )


def backward_workspace_bytes(q: Tensor, k: Tensor) -> int:
    """Size of the uint8 workspace, 64-byte aligned, that `backward_out` takes for these shapes in this process."""
    return _call(_ops.backward_workspace_bytes, q, k)


def backward_out(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    high_precision_out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    is_causal: bool,
    recipe: str | Recipe,
    row_exponent: Tensor | None,
    workspace: Tensor,
    *,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    deterministic: bool = True,
) -> None:
    """`backward` into caller-owned dq, dk, dv: allocates nothing. `workspace`: see `backward_workspace_bytes`.

    Autograd sees the writes: a graph that has saved one of these tensors raises when it is used.
    """
    _call(
        _ops.backward.out,
        grad_out,
        q,
        k,
        v,
        high_precision_out,
        lse,
        softmax_scale,
        is_causal,
        str(recipe),
        row_exponent,
        workspace,
        dq=dq,
        dk=dk,
        dv=dv,
        deterministic=deterministic,
    )
    for x in (dq, dk, dv, workspace):
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)


def explain(
    op: str, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, recipe: str | Recipe = Recipe.FP4
) -> str:
    """Which kernels a call of `op` ("forward" or "backward") would use, and in brackets why others would not.

    "cpu", or a family of csrc/cuda: "sm90", "mma_sync (sm90: compiled for another compute capability)". Runs nothing.
    """
    return _call(_ops.explain, op, q, k, v, is_causal, str(recipe))
