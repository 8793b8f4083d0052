"""FastVideo's Triton attention for quantisation-aware training (package fastvideo-kernel).

Configured to compute the `cudnn` recipe: local scales, no smoothing, backward on the fake-quantised operands
with the high-precision output. Its forward quantises P against the running maximum instead of a power of two,
so `out` differs from the reference by quantisation noise.
"""

from __future__ import annotations

import torch
from problem import Problem

from .base import Peer, differentiable, missing, not_attention, not_in, not_on_cuda

_MODULE = "fastvideo_kernel.triton_kernels.attn_qat_train"
_FLAGS = {  # positional, in this order, after (q, k, v, causal, softmax_scale)
    "use_qat_qkv_backward": True,
    "smooth_k": False,
    "warp_specialize": False,
    "is_qat": True,
    "two_level_quant_p": False,
    "fake_quant_p": True,
    "use_high_prec_o": True,
    "smooth_q": False,
    "use_global_sf_p": False,
    "use_global_sf_qkv": False,
}


class FastVideo(Peer):
    name = "fastvideo"
    distribution = "fastvideo-kernel"
    computes = "cudnn"

    def why_not(self, problem: Problem) -> str | None:
        return (
            not_attention(problem)
            or not_on_cuda(problem)
            or not_in((torch.bfloat16, torch.float16), problem)
            or missing(_MODULE)
        )

    def prepare(self, problem: Problem):
        from fastvideo_kernel.triton_kernels.attn_qat_train import attention

        options = (problem.case.causal, problem.softmax_scale, *_FLAGS.values())
        return differentiable(lambda q, k, v: attention(q, k, v, *options), problem)


PEERS = (FastVideo(),)
