"""delta = rowsum(high_precision_out * grad_out), in FP32."""

import pytest
import torch
from cases import DTYPES, SHAPES, Shape, as_bshd, make_case
from contract import assert_close, assert_same_bits

import attn_qat
from attn_qat import reference

FP32 = 1e-6  # products of BF16 or FP16 numbers are exact in FP32, so that only the sums round


def operands(shape, device, dtype=torch.bfloat16):
    case = make_case(shape, device, dtype)
    return case.q, case.grad_out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_preprocess(shape, dtype, device):
    out, grad_out = operands(shape, device, dtype)
    delta = attn_qat.preprocess(out, grad_out)
    assert delta.dtype == torch.float32 and delta.is_contiguous()
    assert_close(delta, reference.preprocess(out.cpu(), grad_out.cpu()), FP32, "delta")


@pytest.mark.parametrize("layouts", [(as_bshd, as_bshd), (as_bshd, torch.clone)], ids=["both", "one"])
def test_views(layouts, device):
    out, grad_out = operands(Shape(2, 3, 3, 33, 1, 64), device)
    views = [layout(x) for layout, x in zip(layouts, (out, grad_out))]
    assert_same_bits(attn_qat.preprocess(*views), attn_qat.preprocess(out, grad_out))


@pytest.mark.parametrize("empty", [{"batch": 0}, {"seq_q": 0}, {"heads_q": 0, "heads_kv": 0}], ids=str)
def test_empty(empty, device):
    out, grad_out = operands(Shape(**empty), device)
    assert attn_qat.preprocess(out, grad_out).shape == out.shape[:3]


def test_nan_stays_in_its_row(device):
    out, grad_out = operands(Shape(), device)
    out[0, 1, 5, 3] = torch.nan
    marked = attn_qat.preprocess(out, grad_out).isnan()
    assert marked.nonzero().tolist() == [[0, 1, 5]]
