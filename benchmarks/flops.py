"""What is counted as work. One formula for every implementation, whatever it executes in truth."""

from __future__ import annotations

from cases import Case

# A product between S x S scores and D-wide operands is 2 S^2 D operations for each batch entry and head.
# Counted are 2 products for the forward (S = Q K^T, O = P V), 4 B H S^2 D, and 5 for the backward (S
# again, dP, dV, dQ, dK), 10 B H S^2 D. Products that quantisation-aware training adds (a second output,
# dQ and dK/dV apart) are not work in this sense but its price: they show as fewer TFLOP/s. A causal mask
# needs half of the scores.
PRODUCTS = {"forward": 2, "backward": 5, "forward_backward": 7}


def counted_flops(op: str, case: Case) -> float | None:
    """None for operators that only move memory."""
    if op not in PRODUCTS:
        return None
    batch, heads, seq, head_dim = case.shape
    return PRODUCTS[op] * 2.0 * batch * heads * seq * seq * head_dim / (2 if case.causal else 1)


def counted_bytes(op: str, case: Case, itemsize: int) -> float | None:
    """Bytes that have to be read and written once. None for the attention operators."""
    batch, heads, seq, head_dim = case.shape
    rows = batch * heads * seq
    values = rows * head_dim
    return {
        "fake_quantize": 2.0 * values * itemsize,
        "quantize": values * (itemsize + 1 / 2 + 1 / 16),  # half a byte a code, a byte a block of 16
        "preprocess": 2.0 * values * itemsize + 4.0 * rows,
    }.get(op)
