"""This package, through its public functions."""

from __future__ import annotations

import attn_qat
from problem import Problem

from .base import Peer, differentiable


class AttnQat(Peer):
    name = "attn_qat"
    distribution = "attn-qat"
    deterministic = True

    def why_not(self, problem: Problem) -> str | None:
        return None  # what it cannot run raises

    def prepare(self, problem: Problem):
        recipe, scale, causal = problem.recipe, problem.softmax_scale, problem.case.causal
        if problem.op == "forward_backward":
            return differentiable(
                lambda q, k, v: attn_qat.attention(
                    q, k, v, is_causal=causal, recipe=recipe, deterministic=self.deterministic
                ),
                problem,
            )
        if problem.op == "forward":
            q, k, v, _ = problem.tensors.values()
            return lambda: attn_qat.forward(q, k, v, scale, causal, recipe)[:1]
        if problem.op == "backward":
            q, k, v, grad_out = problem.tensors.values()
            _, high_precision_out, lse, row_exponent = attn_qat.forward(q, k, v, scale, causal, recipe)
            saved = (high_precision_out, lse, scale, causal, recipe, row_exponent, self.deterministic)
            return lambda: attn_qat.backward(grad_out, q, k, v, *saved)
        if problem.op == "preprocess":
            o, grad_out = problem.tensors.values()
            return lambda: (attn_qat.preprocess(o, grad_out),)
        (x,) = problem.tensors.values()
        if problem.op == "quantize":
            return lambda: attn_qat.quantize(x)
        return lambda: (attn_qat.fake_quantize(x),)


class AttnQatUnordered(AttnQat):
    name = "attn_qat_unordered"
    deterministic = False

    def why_not(self, problem: Problem) -> str | None:
        return None if problem.op.endswith("backward") else "its backward alone differs"


PEERS = (AttnQat(), AttnQatUnordered())
