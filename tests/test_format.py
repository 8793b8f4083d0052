"""NVFP4 numbers against an independent oracle: ml_dtypes for the two encodings, rational numbers for ties.

Quotients are taken in float64. An FP32 number over a 4-bit scale (or over 6) that is not a midpoint is a
relative 2^-25 or more away from it, so that float64 decides like exact arithmetic.
"""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from contract import assert_same_bits

import attn_qat

E4M3 = np.arange(1, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)  # bytes 0x01..0x7E
E2M1 = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
SIXTEENTH = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
DTYPES = pytest.mark.parametrize("dtype", list(SIXTEENTH), ids=str)


def oracle(x: torch.Tensor) -> torch.Tensor:
    """fake_quantize of (rows, n <= 16): one block a row."""
    values = x.double().cpu().numpy()
    amax = np.abs(values).max(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        scale = np.clip(amax / 6, 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        code = np.clip(values / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return torch.from_numpy(np.where(np.isfinite(amax), code * scale, np.nan)).to(x.dtype)


def with_neighbours(x: torch.Tensor) -> torch.Tensor:
    """Positive x, the next smaller and the next larger number of its dtype: (3, *x.shape)."""
    bits = x.view(SIXTEENTH[x.dtype])
    return torch.stack((bits - 1, bits, bits + 1)).view(x.dtype)


def test_tables():
    """The bytes that the other tests index by are the numbers of the contract."""
    assert E2M1.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert E4M3[0] == 2.0**-9 and E4M3[-1] == 448 and len(E4M3) == 126


@pytest.mark.parametrize("maximum", [None, 2.0**-9, 0.09375, 1.0, 6.0, 7.125, 1000.0, 2688.0, 3e38], ids=str)
def test_every_bf16_pattern(maximum, device):
    """All 65,536 patterns, alone and beside a fixed second element; NaN and Inf included."""
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).unsqueeze(-1)
    x = patterns if maximum is None else torch.cat((patterns, torch.full_like(patterns, maximum)), -1)
    assert_same_bits(attn_qat.fake_quantize(x.to(device)), oracle(x))


@DTYPES
def test_every_midpoint_of_every_scale(dtype, device):
    """x = scale * midpoint, and one step to either side, for all 126 scales and 7 midpoints, both signs."""
    scales = torch.from_numpy(E4M3)[:, None]
    midpoints = torch.from_numpy((E2M1[1:] + E2M1[:-1]) / 2)
    x = with_neighbours((scales * midpoints).to(dtype))
    blocks = torch.cat(
        (6 * scales.to(dtype).expand(3, -1, 1), x, -x), -1
    )  # 6 * scale fixes the block's scale
    got = attn_qat.fake_quantize(blocks.to(device)).double().cpu()

    def nearest_even(value: float, scale: float) -> float:
        distance = [abs(Fraction(abs(value)) / Fraction(scale) - Fraction(v)) for v in E2M1]
        code = min(range(8), key=lambda c: (distance[c], c % 2))
        return float(np.copysign(E2M1[code] * scale, value))

    want = [[[nearest_even(v, row[0] / 6) for v in row] for row in plane] for plane in blocks.tolist()]
    assert_same_bits(got, torch.tensor(want, dtype=torch.float64))


@DTYPES
def test_every_scale_midpoint(dtype, device):
    """Block maxima of 6 * (midpoint of two E4M3 numbers), and one step to either side: ties go to even."""
    amax = with_neighbours(torch.from_numpy(3 * (E4M3[1:] + E4M3[:-1])).to(dtype))

    def nearest_even(value: float) -> int:
        distance = [abs(Fraction(value) / 6 - Fraction(s)) for s in E4M3]
        return min(range(1, 127), key=lambda byte: (distance[byte - 1], byte % 2))

    blocks = torch.nn.functional.pad(amax.unsqueeze(-1), (0, 15))
    scales = attn_qat.quantize(blocks.to(device))[1].view(torch.uint8).squeeze(-1)
    assert scales.tolist() == [[nearest_even(v) for v in row] for row in amax.tolist()]


@pytest.mark.parametrize("amax", [2688.0, 2700.0, 2784.0, 2790.0, 3072.0, 1e10, 3.4028234663852886e38])
def test_scale_saturates(amax, device):
    """From 448 on the scale is 448, byte 0x7E; 464 is where a plain cast turns to NaN."""
    x = torch.zeros(1, 16, device=device).index_fill_(1, torch.tensor([5], device=device), -amax)
    data, scales = attn_qat.quantize(x)
    assert scales.view(torch.uint8).item() == 0x7E and data[0, 2].item() >> 4 == 0xF
    assert attn_qat.fake_quantize(x)[0, 5].item() == -2688


def test_every_packed_byte(device):
    """dequantize of all 256 code bytes x all 126 scales is code * scale, low nibble first."""
    data = torch.arange(256, dtype=torch.uint8).repeat(126, 1)
    scales = torch.arange(1, 127, dtype=torch.uint8).repeat_interleave(32).view(126, 32)
    got = attn_qat.dequantize(data.to(device), scales.view(torch.float8_e4m3fn).to(device), torch.float32)
    values = np.concatenate((E2M1, -E2M1))
    want = (
        np.stack((values[np.arange(256) & 15], values[np.arange(256) >> 4]), -1).reshape(1, 512)
        * E4M3[:, None]
    )
    assert_same_bits(got, torch.from_numpy(want).float())


def test_scalar_e4m3_encode():
    """Every E4M3 number, every midpoint down to 2^-10, and one FP32 step to either side of each."""
    module = pytest.importorskip("attn_qat._C", reason="no module for this interpreter", exc_type=ImportError)
    numbers = np.concatenate(([0.0], E4M3))
    values = torch.from_numpy(np.concatenate((E4M3, (numbers[1:] + numbers[:-1]) / 2))).float()
    values = with_neighbours(values).flatten().clamp(max=448)
    want = values.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert [module.e4m3_encode(x) for x in values.tolist()] == want.tolist()
