"""fake_quantize, quantize and dequantize, bit for bit against the reference.

test_format.py has the numbers of the format; the cases here are single blocks that broke others.
"""

import math

import pytest
import torch
from cases import DTYPES
from contract import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_qat
from attn_qat import reference

VECTORS = [(1,), (15,), (40,), (3, 16), (5, 24), (130, 80)]
SHAPES = [*VECTORS, (2, 7, 64), (2, 3, 17, 48), (1, 2, 33, 128), (2, 2, 18, 20)]
SHAPE_AXIS = [(shape, axis) for shape in SHAPES for axis in (-1, -2) if len(shape) >= -axis]
PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)


def spread(shape, dtype, device, seed=0):
    """Values over 12 binades, so that zero, subnormal, ordinary and saturated blocks all occur."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-9, 10, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * torch.exp2(exponents)).to(device, dtype)


def codes(data: torch.Tensor) -> torch.Tensor:
    """The nibbles of packed data, without the sign of zeros."""
    nibbles = torch.stack((data & 15, data >> 4), -1).flatten(-2)
    return torch.where(nibbles == 8, 0, nibbles)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape, axis", SHAPE_AXIS, ids=str)
def test_fake_quantize(shape, axis, dtype, device):
    x = spread(shape, dtype, device)
    got = attn_qat.fake_quantize(x, axis)
    assert got.is_contiguous() and got.data_ptr() != x.data_ptr()
    assert_same_bits(got, reference.fake_quantize(x.cpu(), axis))
    assert_same_bits(attn_qat.fake_quantize(x, axis + len(shape)), got)  # the non-negative spelling


@pytest.mark.parametrize("tiled", [False, True], ids=["linear", "tiled"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape, axis", [(s, a) for s, a in SHAPE_AXIS if s[a] % 2 == 0], ids=str)
def test_quantize_and_back(shape, axis, dtype, tiled, device):
    x = spread(shape, dtype, device)
    data, scales = attn_qat.quantize(x, axis, None, tiled)
    want_data, want_scales = reference.quantize(x.cpu(), axis, None, tiled)
    assert data.is_contiguous() and scales.is_contiguous()
    assert_same_bits(codes(data), codes(want_data), "data")
    assert_same_bits(scales, want_scales, "scales")
    back = attn_qat.dequantize(data, scales, dtype, axis, None, tiled)
    assert back.is_contiguous()
    assert_same_bits(back, attn_qat.fake_quantize(x, axis))


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("g", [1.0, 0.37, 1e-4, 3000.0, 2.0**-126, 1e30])
def test_global_scale(g, axis, device):
    """It divides before quantisation and multiplies when decoding; the three functions agree on it."""
    x = spread((3, 32, 48), torch.float32, device)
    scale = torch.tensor([g], device=device)
    got = attn_qat.fake_quantize(x, axis, scale)
    assert_same_bits(got, reference.fake_quantize(x.cpu(), axis, scale.cpu()))
    data, scales = attn_qat.quantize(x, axis, scale)
    assert_same_bits(attn_qat.dequantize(data, scales, x.dtype, axis, scale), got)
    zero_dim = attn_qat.fake_quantize(x, axis, scale.reshape(()))
    assert_same_bits(zero_dim, got)


@pytest.mark.parametrize("g", [0.0, -1.0, math.nan, math.inf])
def test_bad_global_scale(g, device):
    """Refused on the CPU. On a GPU the value stays on the device, and what it gives is undefined."""
    if device.type != "cpu":
        pytest.skip("a device value is not looked at")
    x, scale = spread((3, 32), torch.float32, device), torch.tensor([g])
    packed = attn_qat.quantize(x)
    for call in (
        lambda: attn_qat.fake_quantize(x, -1, scale),
        lambda: attn_qat.quantize(x, -1, scale),
        lambda: attn_qat.dequantize(*packed, x.dtype, -1, scale),
    ):
        with pytest.raises(ValueError, match=f"global_scale .*{g:g}.* takes"):
            call()


def test_low_nibble_is_the_even_index(device):
    x = torch.tensor([[6.0, 1.0, -0.5, 3.0] + [0.0] * 12], device=device)
    data, scales = attn_qat.quantize(x)
    assert scales.view(torch.uint8).tolist() == [[0x38]]  # 1.0
    assert codes(data).tolist() == [[7, 2, 9, 5] + [0] * 12]
    assert data[0, :2].tolist() == [0x27, 0x59]


def test_axis_moves_last_in_packed_form(device):
    x = spread((2, 3, 40, 64), torch.bfloat16, device)
    data, scales = attn_qat.quantize(x, -2)
    assert data.shape == (2, 3, 64, 20) and scales.shape == (2, 3, 64, 3)
    transposed_data, transposed_scales = attn_qat.quantize(x.mT.contiguous())
    assert torch.equal(codes(data), codes(transposed_data))
    assert_same_bits(scales, transposed_scales)


@pytest.mark.parametrize("rows, columns", [(1, 64), (127, 64), (128, 16), (129, 80), (300, 144)])
def test_tiled_layout(rows, columns, device):
    """Scale (m, j) of a 128 x 4 tile is byte (m % 32) * 16 + (m / 32) * 4 + j; tiles in row-major order."""
    x = spread((2, rows, columns), torch.bfloat16, device)
    linear = attn_qat.quantize(x)[1].view(torch.uint8).cpu()
    tiled = attn_qat.quantize(x, tiled_scales=True)[1].view(torch.uint8).cpu()
    tile_columns = math.ceil(columns / 64)
    assert tiled.shape == (2, math.ceil(rows / 128) * 128, tile_columns * 4)
    want = torch.zeros(2, tiled[0].numel(), dtype=torch.uint8)  # padding bytes are 0
    for m in range(rows):
        for j in range(columns // 16):
            tile = m // 128 * tile_columns + j // 4
            want[:, tile * 512 + m % 32 * 16 + m % 128 // 32 * 4 + j % 4] = linear[:, m, j]
    assert torch.equal(tiled.flatten(1), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_a_bad_value_marks_its_block_only(bad, dtype, device):
    x = spread((4, 40), dtype, device)
    clean = attn_qat.fake_quantize(x)
    x[1, 20], x[2, 39] = bad, bad  # a full block, and the short last one
    marked = torch.zeros(4, 40, dtype=torch.bool, device=device)
    marked[1, 16:32], marked[2, 32:] = True, True
    got = attn_qat.fake_quantize(x)
    assert torch.equal(got.isnan(), marked)
    assert torch.equal(got[~marked], clean[~marked])
    data, scales = attn_qat.quantize(x)
    assert scales.view(torch.uint8)[1, 1] == 0x7F and scales.view(torch.uint8)[2, 2] == 0x7F
    assert_same_bits(attn_qat.dequantize(data, scales, dtype), got)


VIEWS = {
    "bshd": lambda x: x.transpose(1, 2),
    "every second row": lambda x: x[:, :, ::2],
    "expanded head": lambda x: x[:, :1].expand(-1, 5, -1, -1),
    "columns 16 to 48": lambda x: x[..., 16:48],
}


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_views(view, axis, device):
    """A view gives what its copy gives, in fresh contiguous memory."""
    x = view(spread((2, 4, 36, 64), torch.bfloat16, device))
    got = attn_qat.fake_quantize(x, axis)
    assert got.is_contiguous()
    assert_same_bits(got, attn_qat.fake_quantize(x.contiguous(), axis))
    data, scales = attn_qat.quantize(x, axis)
    assert_same_bits(attn_qat.dequantize(data, scales, x.dtype, axis), got)


EMPTY = [((0, 16), -1), ((3, 0), -1), ((0, 3, 16), -2), ((2, 0, 16), -2)]


@pytest.mark.parametrize("shape, axis", EMPTY, ids=str)
def test_empty(shape, axis, device):
    x = torch.empty(shape, device=device)
    assert attn_qat.fake_quantize(x, axis).shape == shape
    if shape[axis] % 2 == 0:
        assert attn_qat.dequantize(*attn_qat.quantize(x, axis), x.dtype, axis).shape == shape


# --- single blocks: the listed values, zeros after them -----------------------------------------------------

BLOCKS = {
    "zeros": ([0.0], [0.0]),
    "one step of the floor": ([0.001], [2.0**-10]),
    "a tie below it": ([2.0**-11], [0.0]),
    "above the tie": ([0.0004931640625], [2.0**-10]),
    "between steps": ([0.00146484375], [2.0**-9]),
    "ties": ([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], [6, 0, 1, 1, 2, 2, 4, 4]),
    "negative ties": ([6, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5], [6, 0, -1, -1, -2, -2, -4, -4]),
    "scale tie to 1.0": ([6.375], [6.0]),
    "scale tie to 1.25": ([7.125], [7.5]),
    "scale 1.125": ([6.37890625], [6.75]),
    "scale 288": ([1800, 100], [1728, 144]),
    "largest": ([2688], [2688]),
    "saturated": ([6000, 100], [2688, 0]),
    "far beyond": ([3e38, 1000, 200], [2688, 896, 224]),
}


NOT_HELD = {
    ("scale 1.125", torch.bfloat16),
    ("far beyond", torch.float16),
}  # the dtype lacks the value


@pytest.mark.parametrize(
    "name, dtype", [(n, d) for n in BLOCKS for d in DTYPES if (n, d) not in NOT_HELD], ids=str
)
def test_to_c17_blocks(name, dtype, device):
    values, want = BLOCKS[name]
    x = torch.full((3, 16), 1000.0)  # neighbours that must not matter
    x[0] = torch.tensor(values + [0.0] * (16 - len(values)))
    x = x.to(device, dtype)
    assert attn_qat.fake_quantize(x)[0].tolist() == want + [0.0] * (16 - len(want))
    assert attn_qat.quantize(x)[1].view(torch.uint8)[0, 0] <= 0x7E


@pytest.mark.parametrize("length", [24, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tail_is_padded_with_zeros(length, dtype, device):
    x = spread((3, length), dtype, device)
    padded = torch.nn.functional.pad(x, (0, 48 - length))
    assert_same_bits(attn_qat.fake_quantize(x), attn_qat.fake_quantize(padded)[:, :length].contiguous())
    data, scales = attn_qat.quantize(x)
    want_data, want_scales = attn_qat.quantize(padded)
    assert torch.equal(codes(data), codes(want_data)[:, :length])
    assert_same_bits(scales, want_scales[:, : -(-length // 16)].contiguous())


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 300])
def test_tile_padding_is_zero(rows, device):
    """Whatever was in memory before: blocks of the allocator are filled with 0xFF and given back first."""
    x = spread((rows, 80), torch.bfloat16, device)
    shape = (math.ceil(rows / 128) * 128, 8)
    for _ in range(3):
        torch.full(shape, 0xFF, dtype=torch.uint8, device=device)
    linear, tiled = attn_qat.quantize(x)[1], attn_qat.quantize(x, tiled_scales=True)[1]
    assert tiled.shape == shape
    assert_same_bits(reference.untile_scales(tiled.cpu(), rows, 5), linear)
    assert int((tiled.view(torch.uint8) != 0).sum()) == rows * 5  # no scale of real values is byte 0


@pytest.mark.parametrize("amax", [0.0, 1e-38, 5.0, 3e38])
def test_global_scale_from_the_largest_magnitude(amax, device):
    """g = max|x| / (6 * 448), which multiplies when decoding, keeps the largest value; never NaN."""
    x = torch.zeros(2, 16, device=device)
    x[0, 3], x[1, 0] = -amax, amax / 5
    g = (x.abs().amax() / (6 * 448)).clamp(min=2.0**-126).reshape(1)
    got = attn_qat.fake_quantize(x, -1, g)
    assert bool(got.isfinite().all())
    if amax >= 1:
        assert got[0, 3].item() == pytest.approx(-amax, rel=2.0**-22)


# --- properties, one block or a few at a time ---------------------------------------------------------------

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
anything = st.floats(width=32)


def lines(elements, sizes=st.integers(1, 24).map(lambda n: 2 * n)):
    """1-D FP32 tensors of even length."""
    return sizes.flatmap(lambda n: st.lists(elements, min_size=n, max_size=n)).map(torch.tensor)


@PROPERTY
@given(lines(anything), st.sampled_from(DTYPES))
def test_packed_and_fake_agree(device, x, dtype):
    x = x.to(device, dtype)
    assert_same_bits(attn_qat.dequantize(*attn_qat.quantize(x), dtype), attn_qat.fake_quantize(x))


@PROPERTY
@given(lines(st.floats(-6, 6, width=32)), st.integers(-4, 5))
def test_powers_of_two_commute(device, x, k):
    """As long as the block's scale is a normal E4M3 number before and after: here it is 1, then 2^k."""
    x[::16] = 6.0
    x = x.to(device)
    assert_same_bits(attn_qat.fake_quantize(x * 2.0**k), attn_qat.fake_quantize(x) * 2.0**k)


@PROPERTY
@given(lines(finite))
def test_idempotent(device, x):
    """For blocks whose maximum is at least 6 * 2^-6, so that their scale is a normal number."""
    x[::16] = x[::16].abs().clamp(min=6 * 2.0**-6).copysign(x[::16])
    once = attn_qat.fake_quantize(x.to(device))
    assert_same_bits(attn_qat.fake_quantize(once), once)


@PROPERTY
@given(lines(finite, st.just(64)), st.permutations(range(4)))
def test_blocks_are_independent(device, x, order):
    blocks = x.to(device).view(4, 16)
    got = attn_qat.fake_quantize(blocks[list(order)].flatten())
    assert_same_bits(got.view(4, 16), attn_qat.fake_quantize(blocks.flatten()).view(4, 16)[list(order)])


@PROPERTY
@given(lines(finite))
def test_odd_and_near(device, x):
    """fq(-x) == -fq(x), and no value in range moves by more than its block's scale, half the widest gap."""
    x = x.clamp(-2688, 2688).to(device)
    got = attn_qat.fake_quantize(x)
    assert_same_bits(attn_qat.fake_quantize(-x), -got)
    scale = attn_qat.quantize(x)[1].float().repeat_interleave(16)[: len(x)]
    assert bool(((got - x).abs() <= scale).all())
