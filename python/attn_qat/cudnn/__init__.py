"""cuDNN frontend's `nvfp4_attention_qat_backward`, name for name, on CPUs and Hopper.

It is compiled for Blackwell, too, and has never been run there.
Change the import and keep the call. The numbers are recipe `cudnn`, the published contract; docs/cudnn.md
lists what differs. Errors name tensors as `Nvfp4AttentionQatBackward.execute` does.

Tensors are contiguous (B, H, S, 128) bfloat16 at 16-byte aligned addresses, `lse` is (B, H, S_q) float32, and
all are on one CPU or CUDA device. Other head dims, dtypes, strides and grouped heads: `attn_qat.backward`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._plan import Nvfp4AttentionQatBackward, eager_only
from ._stream import on_stream

__all__ = ["Nvfp4AttentionQatBackward", "TupleDict", "nvfp4_attention_qat_backward"]


class TupleDict(dict):
    """A dict that iterates, unpacks and takes integer indices by its values, in insertion order."""

    def __iter__(self):
        return iter(self.values())

    def __getitem__(self, key):
        if not isinstance(key, int):
            return super().__getitem__(key)
        if not 0 <= key < len(self):
            raise IndexError(f"TupleDict: index is {key}, takes 0 to {len(self) - 1}")
        return list(self.values())[key]


@eager_only
def nvfp4_attention_qat_backward(
    do_tensor: Tensor,
    q_tensor: Tensor,
    k_tensor: Tensor,
    v_tensor: Tensor,
    high_precision_o_tensor: Tensor,
    lse_tensor: Tensor,
    *,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    dq_tensor: Tensor | None = None,
    dk_tensor: Tensor | None = None,
    dv_tensor: Tensor | None = None,
    current_stream=None,
    backend: str = "auto",
    head_chunk: int = 0,
    workspace_limit_bytes: int | None = None,
) -> TupleDict:
    """Gradients of NVFP4 attention, as a TupleDict of dq_tensor, dk_tensor and dv_tensor, in this order.

    high_precision_o_tensor is the output with P not quantised and lse_tensor its natural log-sum-exp, as
    `attn_qat.forward` with recipe "cudnn" returns them. Gradients go into dq_tensor, dk_tensor and dv_tensor
    where given, else into new tensors. Options and errors: `Nvfp4AttentionQatBackward` and its `execute`.
    """
    plan = Nvfp4AttentionQatBackward(
        q_tensor,
        k_tensor,
        v_tensor,
        high_precision_o_tensor,
        do_tensor,
        lse_tensor,
        is_causal=is_causal,
        softmax_scale=softmax_scale,
        backend=backend,
        head_chunk=head_chunk,
        workspace_limit_bytes=workspace_limit_bytes,
    )
    plan.compile()
    with on_stream(current_stream, q_tensor.device):  # the allocator then knows the stream that uses them
        grads = [
            torch.empty_like(x, memory_format=torch.contiguous_format) if given is None else given
            for given, x in ((dq_tensor, q_tensor), (dk_tensor, k_tensor), (dv_tensor, v_tensor))
        ]
        workspace = torch.empty(plan.scratch_workspace_bytes(), dtype=torch.uint8, device=q_tensor.device)
    plan.execute(
        q_tensor,
        k_tensor,
        v_tensor,
        high_precision_o_tensor,
        do_tensor,
        lse_tensor,
        *grads,
        workspace,
        current_stream=current_stream,
    )
    return TupleDict(zip(("dq_tensor", "dk_tensor", "dv_tensor"), grads))
