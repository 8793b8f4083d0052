"""backward_dq, backward_dkdv and backward.out are the pieces of backward: same bits."""

import pytest
import torch
from cases import RECIPES, Shape, make_case
from contract import assert_same_bits

import attn_qat

OPS = torch.ops.attn_qat
SHAPES = (
    Shape(2, 4, 2, 70, 100, 64),
    Shape(1, 2, 2, 129, 129, 128, causal=True),
    Shape(1, 2, 2, 40, 17, 64, True),
)
pytestmark = [pytest.mark.parametrize("recipe", RECIPES), pytest.mark.parametrize("shape", SHAPES, ids=str)]


@pytest.mark.parametrize("with_exponent", [True, False], ids=["row_exponent", "lse only"])
def test_halves(shape, recipe, with_exponent, device):
    case = make_case(shape, device)
    saved = case.forward(recipe)
    count = None if with_exponent else -1  # row_exponent is the last argument
    dq, dk, dv = OPS.backward(*case.backward_args(recipe, saved)[:count])
    args = case.half_args(recipe, saved)[:count]
    assert_same_bits(attn_qat.backward_dq(*args), dq, "dq")
    got_dk, got_dv = attn_qat.backward_dkdv(*args)
    assert_same_bits(got_dk, dk, "dk")
    assert_same_bits(got_dv, dv, "dv")


@pytest.mark.parametrize("spare", [0, 48], ids=["exact workspace", "larger workspace"])
def test_out_variant(shape, recipe, spare, device):
    """It writes every element of dq, dk, dv, whatever was there and in the workspace, and returns nothing."""
    case = make_case(shape, device)
    args = case.backward_args(recipe, case.forward(recipe))
    size = OPS.backward_workspace_bytes(case.q, case.k)
    workspace = torch.full((size + spare,), 0xFF, dtype=torch.uint8, device=device)
    grads = {n: torch.full_like(x, torch.nan) for n, x in zip(("dq", "dk", "dv"), (case.q, case.k, case.v))}
    assert OPS.backward.out(*args, workspace, **grads) is None
    for got, want in zip(grads.values(), OPS.backward(*args)):
        assert_same_bits(got, want)
    assert bool((workspace[size:] == 0xFF).all()), "wrote past the bytes that it asked for"


def test_workspace_is_linear_in_length(shape, recipe, device):
    """Twice the queries and keys take at most twice the bytes, to the rounding of a block."""
    case = make_case(shape, device)
    once = OPS.backward_workspace_bytes(case.q, case.k)
    twice = OPS.backward_workspace_bytes(*(torch.cat((x, x), 2) for x in (case.q, case.k)))
    assert 0 < once <= twice <= 2 * once + 4096
