"""How exact dV is: a diffuse head with independent unit-normal Q, K, V and dO, by number of keys.

The exact dV = P^T dO has the same quantised Q and K, but P as softmax gives it (dV does not depend on V).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
QUERIES = 1024  # enough to average over; each query adds its own, independent part of the error
HEAD_DIM = 64


def exact_dv(grad_out: Tensor, q: Tensor, k: Tensor, softmax_scale: float) -> Tensor:
    qh, kh = (ops.fake_quantize(x).float() for x in (q, k))
    total = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
    for rows, grad_rows in zip(qh.split(256, dim=2), grad_out.float().split(256, dim=2), strict=True):
        p = torch.softmax(softmax_scale * rows @ kh.mT, dim=-1)
        total += p.mT @ grad_rows
    return total


def dv_error(length: int, recipes: tuple[str, ...], device: torch.device, seed: int = 0) -> dict[str, float]:
    """Relative Frobenius error of dV for each recipe."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int) -> Tensor:
        return torch.randn(1, 1, rows, HEAD_DIM, generator=generator).to(device, torch.bfloat16)

    q, k, v, grad_out = normal(QUERIES), normal(length), normal(length), normal(QUERIES)
    softmax_scale = HEAD_DIM**-0.5
    exact = exact_dv(grad_out, q, k, softmax_scale)
    errors = {}
    for recipe in recipes:
        _, high_precision_out, lse, row_exponent = ops.forward(q, k, v, softmax_scale, False, recipe)
        _, _, dv = ops.backward(
            grad_out, q, k, v, high_precision_out, lse, softmax_scale, False, recipe, row_exponent
        )
        errors[recipe] = ((dv.float() - exact).norm() / exact.norm()).item()
    return errors
