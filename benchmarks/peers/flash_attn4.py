"""FlashAttention-4 (package flash-attn-4, CuTe DSL): plain attention in 16 bits on Hopper and Blackwell."""

from __future__ import annotations

import torch
from problem import Problem

from .base import PLAIN, Peer, differentiable, missing, not_attention, not_in, not_on_cuda


class FlashAttention4(Peer):
    distribution = "flash-attn-4"
    computes = PLAIN

    def __init__(self, name: str, deterministic: bool):
        self.name, self.deterministic = name, deterministic

    def why_not(self, problem: Problem) -> str | None:
        return (
            not_attention(problem)
            or not_on_cuda(problem)
            or not_in((torch.bfloat16, torch.float16), problem)
            or missing("flash_attn.cute")
        )

    def prepare(self, problem: Problem):
        from flash_attn.cute import flash_attn_func

        options = {"causal": problem.case.causal, "deterministic": self.deterministic}

        def attention(q, k, v):
            result = flash_attn_func(q, k, v, softmax_scale=problem.softmax_scale, **options)
            return result[0] if isinstance(result, tuple) else result  # (out, lse) in most versions

        return differentiable(attention, problem, bshd=True)


PEERS = (
    FlashAttention4("flash_attn4", deterministic=False),
    FlashAttention4("flash_attn4_deterministic", deterministic=True),
)
