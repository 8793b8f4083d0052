"""The formula as a PyTorch user writes it: S x S materialised, tensor operations, gradients by autograd.

Two versions. `eager` keeps the scores in FP32 and meets the accuracy that this package is held to.
`eager_bf16_scores` takes S = Q K^T as a 16-bit product, the usual shortcut: faster, and off by some per cent
where P is quantised, because the codes of P follow the rounded scores. All other products run in the inputs'
dtype.
"""

from __future__ import annotations

import math

import torch
from problem import ATTENTION, Problem
from torch import Tensor

from .base import Peer, differentiable

LOG2E = math.log2(math.e)


@torch.no_grad()
def fake_quantize(x: Tensor, axis: int = -1) -> Tensor:
    """x to NVFP4 and back along `axis`, whose length is a multiple of 16."""
    blocks = x.movedim(axis, -1).unflatten(-1, (-1, 16)).float()
    scale = (blocks.abs().amax(-1, keepdim=True) / 6).clamp_(2**-9, 448).to(torch.float8_e4m3fn).float()
    y = (blocks / scale).clamp_(-6, 6)
    magnitude = y.abs()
    step = torch.where(
        magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0)
    )  # between neighbouring values
    y.div_(step).round_().mul_(step).mul_(scale)
    return y.flatten(-2).movedim(-1, axis).to(x.dtype)


class StraightThrough(torch.autograd.Function):
    """fake_quantize with the identity as its gradient."""

    @staticmethod
    def forward(ctx, x, axis):
        return fake_quantize(x, axis)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Scores(torch.autograd.Function):
    """S = Q K^T in FP32. Its gradient is BF16 by contract, so the two products of the backward are cheap."""

    @staticmethod
    def forward(ctx, q, k):
        ctx.save_for_backward(q, k)
        return q.float() @ k.float().mT

    @staticmethod
    def backward(ctx, grad):
        q, k = ctx.saved_tensors
        grad = grad.bfloat16().to(q.dtype)
        return grad @ k, grad.mT @ q


class WeightedValues(torch.autograd.Function):
    """O = P^ V. The backward has its own P^ for dV, and the gradient of P^ goes to P, straight through."""

    @staticmethod
    def forward(ctx, p, forward_p, backward_p, v):
        ctx.save_for_backward(backward_p, v)
        ctx.dtype_of_p = p.dtype
        return forward_p @ v

    @staticmethod
    def backward(ctx, grad):
        backward_p, v = ctx.saved_tensors
        return (grad @ v.mT).to(ctx.dtype_of_p), None, None, backward_p.mT @ grad


@torch.no_grad()
def quantized_probabilities(s: Tensor, p: Tensor, recipe: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """P^ of the forward and of the backward."""
    if recipe == "fp4_qk":
        p = p.to(dtype)
        return p, p
    # P over its row's factor is exp2(t - E) 2^k, the number that the forward quantises.
    exponent = (s.amax(-1, keepdim=True) * LOG2E).ceil()
    factor = torch.exp2(exponent - s.logsumexp(-1, keepdim=True) * LOG2E - (11 if recipe == "fp4" else 0))
    forward_p = fake_quantize(p / factor).mul_(factor).to(dtype)
    return forward_p, forward_p if recipe == "fp4" else fake_quantize(p).to(dtype)


class Eager(Peer):
    def __init__(self, name: str, fp32_scores: bool):
        self.name, self.fp32_scores = name, fp32_scores

    def version(self) -> str:
        return torch.__version__

    def why_not(self, problem: Problem) -> str | None:
        if problem.op == "quantize":
            return "has no packed form"
        if problem.op not in ATTENTION and not self.fp32_scores:
            return "is the same as eager here"
        return "takes lengths that are multiples of 16" if problem.case.seq % 16 else None

    def prepare(self, problem: Problem):
        if problem.op == "preprocess":
            o, grad_out = problem.tensors.values()
            return lambda: ((o.float() * grad_out.float()).sum(-1),)
        if problem.op == "fake_quantize":
            (x,) = problem.tensors.values()
            return lambda: (fake_quantize(x),)
        return differentiable(lambda q, k, v: self.attention(q, k, v, problem), problem)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
        recipe = problem.recipe
        q, k = StraightThrough.apply(q, -1), StraightThrough.apply(k, -1)
        if recipe != "fp4_qk":
            v = StraightThrough.apply(v, -2 if recipe == "fp4" else -1)
        s = Scores.apply(q, k) if self.fp32_scores else (q @ k.mT).float()
        s = s * problem.softmax_scale
        if problem.case.causal:
            hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
            s = s.masked_fill(hidden, -torch.inf)
        p = s.softmax(-1)
        return WeightedValues.apply(p, *quantized_probabilities(s, p, recipe, v.dtype), v)


PEERS = (Eager("eager", fp32_scores=True), Eager("eager_bf16_scores", fp32_scores=False))
