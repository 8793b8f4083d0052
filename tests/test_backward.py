"""dq, dk and dv against the float64 reference."""

import pytest
import torch
from cases import DTYPES, KINDS, RECIPES, SHAPES, Shape, as_bshd, make_case
from contract import assert_close, assert_same_bits, check_backward

import attn_qat

pytestmark = pytest.mark.parametrize("recipe", RECIPES)
NAMES = ("dq", "dk", "dv")


def check(case, recipe):
    check_backward(case, recipe, case.forward(recipe))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, recipe, device):
    check(make_case(shape, device), recipe)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_dtypes(head_dim, dtype, recipe, device):
    check(make_case(Shape(1, 2, 1, 70, 100, head_dim, causal=True), device, dtype), recipe)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_kinds_of_input(kind, causal, recipe, device):
    check(make_case(Shape(1, 2, 2, 150, 150, 64, causal), device, kind=kind), recipe)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_from_the_reference_forward(causal, recipe, device):
    """Forward and backward together: the reference starts from its own float64 statistics."""
    case = make_case(Shape(1, 4, 2, 150, 150, 64, causal), device)
    want = case.reference_backward(recipe, case.reference_forward(recipe))
    for name, got, expected in zip(NAMES, case.backward(recipe), want):
        assert_close(got, expected, name=name)


def test_without_row_exponent(recipe, device):
    """A caller who has only lse: E = ceil(lse * log2 e), within the same bound of the forward's P."""
    case = make_case(Shape(1, 2, 2, 100, 300, 64), device)
    saved = case.forward(recipe)
    want = case.reference_backward(recipe, saved)
    args = case.backward_args(recipe, saved)[:-1]
    for name, got, expected in zip(NAMES, attn_qat.backward(*args), want):
        assert_close(got, expected, name=name)


@pytest.mark.parametrize("which", ["dqkv", "v", "d"])
def test_bshd_views(which, recipe, device):
    """Transposed views give the bits of their contiguous copies (d is grad_out)."""
    case = make_case(Shape(2, 4, 2, 70, 100, 64), device)
    saved = case.forward(recipe)
    grad_out, q, k, v, *rest = case.backward_args(recipe, saved)
    views = [as_bshd(x) if name in which else x for name, x in zip("dqkv", (grad_out, q, k, v))]
    want = case.backward(recipe, saved)
    for name, got, bits in zip(NAMES, attn_qat.backward(*views, *rest), want):
        assert got.is_contiguous()
        assert_same_bits(got, bits, name)


@pytest.mark.parametrize("which", ["d", "kv", "dqkv"])
def test_expanded_heads(which, recipe, device):
    """One head seen as many, without a copy, gives the bits of the copies (d is grad_out)."""
    case = make_case(Shape(2, 4, 4, 70, 100, 64), device)
    for name, x in zip("dqkv", (case.grad_out, case.q, case.k, case.v)):
        if name in which:
            x.copy_(x[:, :1].clone().expand_as(x))
    saved = case.forward(recipe)
    grad_out, q, k, v, *rest = case.backward_args(recipe, saved)
    views = [
        x[:, :1].contiguous().expand_as(x) if name in which else x
        for name, x in zip("dqkv", (grad_out, q, k, v))
    ]
    want = case.backward(recipe, saved)
    for name, got, bits in zip(NAMES, attn_qat.backward(*views, *rest), want):
        assert_same_bits(got, bits, name)
    options = case.softmax_scale, case.is_causal, recipe
    for got, bits in zip(attn_qat.forward(*views[1:], *options), saved):
        assert_same_bits(got, bits)


EMPTY = [{"batch": 0}, {"seq_q": 0}, {"heads_q": 0, "heads_kv": 0}, {"seq_kv": 0}]


@pytest.mark.parametrize("empty", EMPTY, ids=str)
def test_empty(empty, recipe, device):
    """Gradients of nothing are zeros of the right shape, not uninitialised memory."""
    case = make_case(Shape(**{"batch": 2, "seq_q": 5, "seq_kv": 7, **empty}), device)
    for grad, x in zip(case.backward(recipe), (case.q, case.k, case.v)):
        assert_same_bits(grad, torch.zeros_like(x))


def test_rows_that_see_no_key(recipe, device):
    """They get dq = 0 and add nothing to dk and dv, whatever their grad_out."""
    case = make_case(Shape(1, 2, 2, 40, 17, 64, causal=True), device)
    dq, dk, dv = case.backward(recipe)
    assert dq[:, :, :23].abs().max() == 0
    case.grad_out[:, :, :23] = 1e4
    for got, want in zip(case.backward(recipe), (dq, dk, dv)):
        assert_same_bits(got, want)


def test_keys_that_no_row_sees(recipe, device):
    """Causal, 5 queries and 9 keys: the last query alone sees key 8; without its gradient key 8 gets none."""
    case = make_case(Shape(1, 1, 1, 5, 9, 64, causal=True), device)
    case.grad_out[:, :, 4] = 0
    _, dk, dv = case.backward(recipe)
    assert dk[:, :, 8].abs().max() == 0 and dv[:, :, 8].abs().max() == 0
    assert dk[:, :, 7].abs().max() > 0 and dv[:, :, 7].abs().max() > 0
