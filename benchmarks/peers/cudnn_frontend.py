"""cuDNN frontend's NVFP4 attention QAT backward (package nvidia-cudnn-frontend), by its wrapper function."""

from __future__ import annotations

import attn_qat
import torch
from problem import Problem

from .base import Peer, missing, not_in, not_on_cuda


class CudnnFrontend(Peer):
    name = "cudnn_frontend"
    distribution = "nvidia-cudnn-frontend"
    computes = "cudnn"

    def why_not(self, problem: Problem) -> str | None:
        if problem.op != "backward":
            return "has a backward only"
        return not_on_cuda(problem) or not_in((torch.bfloat16,), problem) or missing("cudnn")

    def prepare(self, problem: Problem):
        from cudnn import nvfp4_attention_qat_backward

        q, k, v, grad_out = problem.tensors.values()
        causal, scale = problem.case.causal, problem.softmax_scale
        # It has no forward: the statistics are ours.
        _, high_precision_out, lse, _ = attn_qat.forward(q, k, v, scale, causal, self.computes)

        def backward():
            result = nvfp4_attention_qat_backward(
                grad_out, q, k, v, high_precision_out, lse, softmax_scale=scale, is_causal=causal
            )
            return result["dq_tensor"], result["dk_tensor"], result["dv_tensor"]

        return backward


PEERS = (CudnnFrontend(),)
