"""out, high_precision_out, lse and row_exponent against the float64 reference."""

import pytest
import torch
from cases import DTYPES, KINDS, RECIPES, SHAPES, Shape, as_bshd, make_case
from contract import assert_same_bits, check_forward

import attn_qat
from attn_qat import reference

pytestmark = pytest.mark.parametrize("recipe", RECIPES)
CROSS = Shape(1, 4, 2, 70, 100, 64)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, recipe, device):
    check_forward(make_case(shape, device), recipe)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_dtypes(head_dim, dtype, recipe, device):
    check_forward(make_case(Shape(1, 2, 1, 70, 100, head_dim, causal=True), device, dtype), recipe)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_kinds_of_input(kind, causal, recipe, device):
    check_forward(make_case(Shape(1, 2, 2, 150, 150, 64, causal), device, kind=kind), recipe)


@pytest.mark.parametrize("which", ["qkv", "v"])
def test_bshd_views(which, recipe, device):
    """A transposed view gives the bits of its contiguous copy."""
    case = make_case(CROSS, device)
    want = case.forward(recipe)
    views = [as_bshd(x) if name in which else x for name, x in zip("qkv", (case.q, case.k, case.v))]
    assert not views[2].is_contiguous()
    for got, bits in zip(attn_qat.forward(*views, *case.options(recipe)), want):
        assert got.is_contiguous()
        assert_same_bits(got, bits)


EMPTY = [{"batch": 0}, {"seq_q": 0}, {"heads_q": 0, "heads_kv": 0}, {"seq_kv": 0}]


@pytest.mark.parametrize("empty", EMPTY, ids=str)
def test_empty(empty, recipe, device):
    """Without keys a row sees nothing: zeros and lse = -inf, as for a masked row."""
    case = make_case(Shape(**{"batch": 2, "seq_q": 5, "seq_kv": 7, **empty}), device)
    out, high_precision_out, lse, row_exponent = case.forward(recipe)
    assert out.shape == high_precision_out.shape == case.q.shape
    assert lse.shape == row_exponent.shape == case.q.shape[:3]
    for zero in (out, high_precision_out):
        assert_same_bits(zero, torch.zeros_like(case.q))
    assert_same_bits(lse, torch.full_like(lse, -torch.inf))
    assert_same_bits(row_exponent, torch.full_like(row_exponent, reference.NO_KEY))


def test_rows_that_see_no_key(recipe, device):
    """Causal with 10 queries and 3 keys: the first 7 rows see none, the rest are as without those rows."""
    case = make_case(Shape(1, 2, 2, 10, 3, 64, causal=True), device)
    out, high_precision_out, lse, row_exponent = case.forward(recipe)
    assert out[:, :, :7].abs().max() == 0 and high_precision_out[:, :, :7].abs().max() == 0
    assert bool((lse[:, :, :7] == -torch.inf).all())
    assert bool((row_exponent[:, :, :7] == reference.NO_KEY).all())
    alone = attn_qat.forward(case.q[:, :, 7:].contiguous(), case.k, case.v, *case.options(recipe))
    for got, want in zip((out, high_precision_out, lse, row_exponent), alone):
        assert_same_bits(got[:, :, 7:], want)


def test_nan_is_seen(recipe, device):
    """A NaN in a query marks that row and no other; one in a key marks every row that sees the key."""
    case = make_case(Shape(1, 1, 1, 20, 20, 64, causal=True), device)
    case.q[0, 0, 4, 7] = torch.nan
    out, high_precision_out, lse, _ = case.forward(recipe)
    for marked in (out.isnan().any(-1), high_precision_out.isnan().any(-1), lse.isnan()):
        assert marked.nonzero().tolist() == [[0, 0, 4]]
    case = make_case(Shape(1, 1, 1, 20, 20, 64), device)
    case.k[0, 0, 3, 60] = torch.inf
    out, high_precision_out, lse, _ = case.forward(recipe)
    assert bool(out.isnan().all() and high_precision_out.isnan().all() and lse.isnan().all())


def test_fp4_qk_has_one_output(recipe, device):
    """Without a quantised P, out and high_precision_out are the same numbers; with it they differ."""
    out, high_precision_out, _, _ = make_case(CROSS, device).forward(recipe)
    assert torch.equal(out, high_precision_out) == (recipe == "fp4_qk")
