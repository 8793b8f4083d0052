"""torch's scaled_dot_product_attention: plain attention, by torch's choice of backend or by a named one."""

from __future__ import annotations

import torch
from problem import Problem
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .base import PLAIN, Peer, differentiable, not_attention, not_on_cuda


class Sdpa(Peer):
    computes = PLAIN

    def __init__(self, name: str, backend: SDPBackend | None = None):
        self.name, self.backend = name, backend

    def version(self) -> str:
        return torch.__version__

    def why_not(self, problem: Problem) -> str | None:
        return not_attention(problem) or (not_on_cuda(problem) if self.backend else None)

    def prepare(self, problem: Problem):
        def attention(q, k, v):
            if self.backend is None:
                return scaled_dot_product_attention(q, k, v, is_causal=problem.case.causal)
            with sdpa_kernel(self.backend):  # raises RuntimeError where the backend cannot
                return scaled_dot_product_attention(q, k, v, is_causal=problem.case.causal)

        return differentiable(attention, problem)


PEERS = (
    Sdpa("sdpa"),
    Sdpa("sdpa_flash", SDPBackend.FLASH_ATTENTION),
    Sdpa("sdpa_cudnn", SDPBackend.CUDNN_ATTENTION),
)
