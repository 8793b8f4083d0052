"""The attn-qat contract in plain PyTorch: slow, exact, and independent of the compiled library.

Everything is written to be read beside the formulas, and it materialises the S_q x S_kv matrices: use it as
an oracle, not to train. Tensors are BHSD. `dtype` is the type that matrix products and softmax are computed
in; float64 gives the oracle. Which FP4 code a value gets is always decided on its FP32 value, whatever
`dtype` is, so that every precision chooses the same codes (up to values that lie on a rounding tie).

    S = softmax_scale Q^ K^T     P = softmax(S)     O_hp = P V^     O = P^ V^           (^: fake-quantised)
    delta = rowsum(O_hp * dO)    dS = bf16(P * (dO V^T - delta))
    dQ = softmax_scale dS K^     dK = softmax_scale dS^T Q^     dV = P^T dO
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 16  # values that share one scale
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9  # the smallest positive E4M3 number: the floor of a block scale
LOG2E = math.log2(math.e)
NO_KEY = -(2**31)  # row_exponent of a row that sees no key

RECIPES = ("cudnn", "fp4", "fp4_qk")
# Before P is quantised it is scaled by 2^k against the row's reference 2^E; 2^11 <= 6 * 448 uses the range.
P_SHIFT = {"cudnn": 0, "fp4": 11}

# The magnitudes of E2M1 are 0 0.5 1 1.5 2 3 4 6. Passing a midpoint steps up by the gap between its
# neighbours; a tie goes to the even code, which is the upper neighbour at every second midpoint.
_E2M1_STEPS = (  # (midpoint, gap, a tie goes up)
    (0.25, 0.5, False),
    (0.75, 0.5, True),
    (1.25, 0.5, False),
    (1.75, 0.5, True),
    (2.5, 1.0, False),
    (3.5, 1.0, True),
    (5.0, 2.0, False),
)
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # index = code without its sign bit


# --- NVFP4 --------------------------------------------------------------------------------------------------


def e4m3_scale(amax: Tensor) -> Tensor:
    """Block scale of a block whose largest magnitude is `amax`: FP32 numbers that E4M3 holds exactly.

    The clamp saturates (a plain cast gives NaN above 448). NaN or Inf gives NaN: it marks the block.
    """
    amax = amax.float()
    scale = (amax / E2M1_MAX).clamp(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn).float()
    return torch.where(amax.isfinite(), scale, torch.nan)


def _round_e2m1(blocks: Tensor, scale: Tensor) -> Tensor:
    """Signed E2M1 values nearest to blocks / scale, without dividing: scale * midpoint is exact in FP32."""
    magnitude = blocks.abs()
    value = torch.zeros_like(blocks)
    for midpoint, gap, tie_goes_up in _E2M1_STEPS:
        edge = scale * midpoint
        value.add_(magnitude >= edge if tie_goes_up else magnitude > edge, alpha=gap)
    return value.copysign_(blocks)


def _blocks(x: Tensor) -> Tensor:
    """(..., n) of any dtype -> FP32 (..., ceil(n / 16), 16), a short last block padded with zeros."""
    count = -(-x.shape[-1] // BLOCK)
    padded = torch.nn.functional.pad(x.float(), (0, count * BLOCK - x.shape[-1]))
    return padded.unflatten(-1, (count, BLOCK))


def _encode_blocks(x: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """(..., n) -> FP32 signed E2M1 values (..., ceil(n / 16), 16) and block scales (..., ceil(n / 16), 1)."""
    blocks = _blocks(x)
    if global_scale is not None:
        blocks = blocks / global_scale.float().reshape(())
    scale = e4m3_scale(blocks.abs().amax(-1, keepdim=True))
    return _round_e2m1(blocks, scale), scale


def _decode_blocks(value: Tensor, scale: Tensor, length: int, global_scale: Tensor | None) -> Tensor:
    """value * scale [* global_scale] in FP32, flattened to (..., length). NaN scales give NaN blocks."""
    decoded = value * scale
    if global_scale is not None:
        decoded = decoded * global_scale.float().reshape(())
    return decoded.flatten(-2)[..., :length]


def fake_quantize(x: Tensor, axis: int = -1, global_scale: Tensor | None = None) -> Tensor:
    """x rounded to what NVFP4 can hold, blocks of 16 along `axis` (-1 or -2). Contiguous, x's dtype."""
    lines = x.movedim(axis, -1)
    value, scale = _encode_blocks(lines, global_scale)
    decoded = _decode_blocks(value, scale, lines.shape[-1], global_scale)
    return decoded.movedim(-1, axis).to(x.dtype).contiguous()


def quantize(
    x: Tensor, axis: int = -1, global_scale: Tensor | None = None, tiled_scales: bool = False
) -> tuple[Tensor, Tensor]:
    """Packed form with the quantised axis last: uint8 (..., n / 2), even index in the low nibble, and
    float8_e4m3fn scales (..., ceil(n / 16)), or tiled (see tile_scales)."""
    lines = x.movedim(axis, -1)
    length = lines.shape[-1]
    if length % 2:
        raise ValueError(f"quantize: x has length {length} along axis {axis}, takes an even length")
    value, scale = _encode_blocks(lines, global_scale)
    code_of = torch.zeros(13, dtype=torch.uint8, device=x.device)  # indexed by twice the magnitude
    code_of[[int(2 * v) for v in _E2M1_VALUES]] = torch.arange(8, dtype=torch.uint8, device=x.device)
    code = code_of[(2 * value.abs()).long()] + 8 * (value < 0).to(torch.uint8)
    low, high = code.flatten(-2)[..., :length].unflatten(-1, (length // 2, 2)).unbind(-1)
    scales = scale.squeeze(-1).abs().to(torch.float8_e4m3fn)  # abs: a NaN scale is the byte 0x7F, not 0xFF
    return low | (high << 4), tile_scales(scales) if tiled_scales else scales


def dequantize(
    data: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    axis: int = -1,
    global_scale: Tensor | None = None,
    tiled_scales: bool = False,
) -> Tensor:
    """The inverse of quantize's packing; the quantised axis returns to its place."""
    length = 2 * data.shape[-1]
    if tiled_scales:
        rows = data.shape[-2] if data.dim() > 1 else 1
        columns = -(-length // BLOCK)
        scales = untile_scales(scales, rows, columns).reshape(*data.shape[:-1], columns)
    code = torch.stack((data & 15, data >> 4), -1).flatten(-2).long()
    values = torch.tensor(_E2M1_VALUES + tuple(-v for v in _E2M1_VALUES), device=data.device)
    decoded = _decode_blocks(_blocks(values[code]), scales.float().unsqueeze(-1), length, global_scale)
    return decoded.movedim(-1, axis).to(dtype).contiguous()


def tile_scales(scales: Tensor) -> Tensor:
    """(..., rows, n) -> (..., 128 ceil(rows / 128), 4 ceil(n / 4)): what block-scaled tensor-core GEMMs read.

    Tiles of 128 rows x 4 scales lie in row-major order; scale (m, j) of a tile is its byte
    (m % 32) * 16 + (m / 32) * 4 + j; padding bytes are 0. A 1-D input is one row.
    """
    matrix = scales.view(torch.uint8)
    matrix = matrix.unsqueeze(0) if matrix.dim() == 1 else matrix
    rows, columns = matrix.shape[-2:]
    padded = torch.nn.functional.pad(matrix, (0, -columns % 4, 0, -rows % 128))
    *leading, padded_rows, padded_columns = padded.shape
    # (tile row, m / 32, m % 32, tile column, j) -> (tile row, tile column, m % 32, m / 32, j)
    tiles = padded.reshape(*leading, padded_rows // 128, 4, 32, padded_columns // 4, 4)
    tiles = tiles.movedim((-5, -2, -3, -4, -1), (-5, -4, -3, -2, -1))
    return tiles.reshape(padded.shape).view(torch.float8_e4m3fn)


def untile_scales(tiled: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of tile_scales: (..., rows, columns), padding dropped."""
    *leading, padded_rows, padded_columns = tiled.shape
    tiles = tiled.view(torch.uint8).reshape(*leading, padded_rows // 128, padded_columns // 4, 32, 4, 4)
    matrix = tiles.movedim((-5, -4, -3, -2, -1), (-5, -2, -3, -4, -1)).reshape(tiled.shape)
    return matrix[..., :rows, :columns].contiguous().view(torch.float8_e4m3fn)


# --- attention ----------------------------------------------------------------------------------------------


def quantize_operands(q: Tensor, k: Tensor, v: Tensor, recipe: str) -> tuple[Tensor, Tensor, Tensor]:
    """Q^, K^, V^ of a recipe, each in its own dtype."""
    if recipe not in RECIPES:
        raise ValueError(f"recipe got {recipe!r}, takes one of {', '.join(RECIPES)}")
    if recipe != "fp4_qk":
        v = fake_quantize(v, -1 if recipe == "cudnn" else -2)
    return fake_quantize(q), fake_quantize(k), v


def _expand_heads(x: Tensor, heads: int) -> Tensor:
    """(B, Hkv, S, D) -> (B, heads, S, D): query head h reads key/value head h // (heads / Hkv)."""
    return x.repeat_interleave(heads // x.shape[1], dim=1) if x.shape[1] != heads else x


def _sum_heads(x: Tensor, heads: int) -> Tensor:
    """(B, Hq, S, D) -> (B, heads, S, D): the sum over each group, the transpose of _expand_heads."""
    return x.unflatten(1, (heads, -1)).sum(2) if x.shape[1] != heads else x


def scores(qh: Tensor, kh: Tensor, softmax_scale: float, is_causal: bool) -> Tensor:
    """t = S * log2 e, (B, H, S_q, S_kv), -inf where query i does not see key j (causal: bottom-right)."""
    t = (qh @ kh.mT) * (softmax_scale * LOG2E)
    if is_causal:
        s_q, s_kv = t.shape[-2:]
        seen = torch.ones(s_q, s_kv, dtype=torch.bool, device=t.device).tril(s_kv - s_q)
        t = t.masked_fill(~seen, -torch.inf)
    return t


def _quantized_p(t: Tensor, exponent: Tensor, recipe: str) -> Tensor:
    """P^ * 2^-E: exp2(t - E) in FP4, scaled by 2^k for the rounding only. exponent: (B, H, S_q, 1), finite.

    t is rounded to FP32 before E is subtracted, so that the forward and the backward round alike."""
    relative = torch.exp2((t.float() - exponent.float()).to(t.dtype)).float()
    shift = 2.0 ** P_SHIFT[recipe]
    return (fake_quantize(relative * shift) / shift).to(t.dtype)


def _finite(x: Tensor) -> Tensor:
    """A row without a visible key has the reference -inf; t - 0 = -inf there, where t - -inf would be NaN."""
    return torch.where(x.isinf(), 0.0, x)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    is_causal: bool,
    recipe: str = "cudnn",
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, high_precision_out (B, Hq, S_q, D) and lse (B, Hq, S_q) in `dtype`; row_exponent int32, as lse."""
    qh, kh, vh = (x.to(dtype) for x in quantize_operands(q, k, v, recipe))
    kh, vh = _expand_heads(kh, q.shape[1]), _expand_heads(vh, q.shape[1])
    t = scores(qh, kh, softmax_scale, is_causal)
    if t.shape[-1] == 0:
        exponent = t.new_full((*t.shape[:-1], 1), -torch.inf)
    else:
        exponent = t.float().amax(-1, keepdim=True).ceil().to(dtype)
    reference = _finite(exponent)

    p = torch.exp2(t - reference)
    row_sum = p.sum(-1, keepdim=True)  # of the unquantised p, for both outputs
    inverse_sum = torch.where(row_sum == 0, 0.0, 1 / row_sum)
    high_precision_out = (p @ vh) * inverse_sum
    out = high_precision_out
    if recipe != "fp4_qk":
        out = (_quantized_p(t, reference, recipe) @ vh) * inverse_sum
    lse = ((exponent + row_sum.log2()) / LOG2E).squeeze(-1)
    row_exponent = torch.where(exponent.isfinite(), exponent, NO_KEY).squeeze(-1).to(torch.int32)
    return out, high_precision_out, lse, row_exponent


def preprocess(high_precision_out: Tensor, grad_out: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """delta = rowsum(O_hp * dO), (B, Hq, S_q), in `dtype`."""
    return (high_precision_out.to(dtype) * grad_out.to(dtype)).sum(-1)


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    high_precision_out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    is_causal: bool,
    recipe: str = "cudnn",
    row_exponent: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in `dtype`, shaped like q, k, v. row_exponent None: E = ceil(lse * log2 e)."""
    qh, kh, vh = (x.to(dtype) for x in quantize_operands(q, k, v, recipe))
    kh, vh = _expand_heads(kh, q.shape[1]), _expand_heads(vh, q.shape[1])
    grad_out = grad_out.to(dtype)
    lse2 = (lse.to(dtype) * LOG2E).unsqueeze(-1)  # base-2 log-sum-exp, in the unit of t
    sees_a_key = lse2 != -torch.inf
    delta = preprocess(high_precision_out, grad_out, dtype).unsqueeze(-1)

    t = scores(qh, kh, softmax_scale, is_causal)
    p = torch.where(sees_a_key, torch.exp2(t - _finite(lse2)), 0.0)
    if recipe == "fp4_qk":
        p_hat = p
    elif recipe == "cudnn":
        p_hat = fake_quantize(p.float()).to(dtype)
    else:
        exponent = lse2.float().ceil() if row_exponent is None else row_exponent.unsqueeze(-1)
        exponent = torch.where(sees_a_key, exponent.to(dtype), 0.0)
        factor = torch.where(sees_a_key, torch.exp2(exponent - _finite(lse2)), 0.0)  # 2^E exp(-lse)
        p_hat = _quantized_p(t, exponent, recipe) * factor

    ds = (p * (grad_out @ vh.mT - delta)).to(torch.bfloat16).to(dtype)
    dq = softmax_scale * (ds @ kh)
    dk = softmax_scale * _sum_heads(ds.mT @ qh, k.shape[1])
    dv = _sum_heads(p_hat.mT @ grad_out, v.shape[1])
    return dq, dk, dv


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, softmax_scale, is_causal, recipe):
        dtype = torch.promote_types(q.dtype, torch.float32)
        out, high_precision_out, lse, row_exponent = forward(q, k, v, softmax_scale, is_causal, recipe, dtype)
        ctx.save_for_backward(q, k, v, high_precision_out.to(q.dtype), lse, row_exponent)
        ctx.options = softmax_scale, is_causal, recipe
        return out.to(q.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out):
        q, k, v, high_precision_out, lse, row_exponent = ctx.saved_tensors
        grads = backward(grad_out, q, k, v, high_precision_out, lse, *ctx.options, row_exponent, lse.dtype)
        return *(g.to(x.dtype) for g, x in zip(grads, (q, k, v))), None, None, None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    recipe: str = "fp4",
) -> Tensor:
    """Differentiable out (B, Hq, S_q, D) in q's dtype; computed in FP32, or in FP64 for FP64 inputs."""
    softmax_scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return _Attention.apply(q, k, v, softmax_scale, is_causal, recipe)
