"""The plan of one problem: validated once, executed into caller-owned memory."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ..recipe import Recipe
from ._operands import ALIGNMENT, Operand, check_disjoint, check_workspace
from ._options import (
    OWN_BACKEND,
    check_backend_is_here,
    check_device_is_served,
    check_is_causal,
    check_options,
    check_softmax_scale,
    softmax_scale_of,
)
from ._stream import on_stream

HEAD_DIM = 128
KERNEL_ALIGNMENT = 64  # bytes, of the workspace that the kernels are given

# Addresses are not to be traced: torch.compile breaks its graph here, and says this under fullgraph.
eager_only = torch.compiler.disable(
    reason="attn_qat.cudnn checks addresses and is not traced; attn_qat.backward is, with recipe 'cudnn'"
)


class Nvfp4AttentionQatBackward:
    """A plan for one problem: `check_support`, `compile`, then `execute` any number of times.

    The samples give shapes, dtypes, strides and the device; they are neither read nor kept. sample_q,
    sample_high_precision_o and sample_do: (B, H, S_q, 128) bfloat16. sample_k and sample_v: (B, H, S_kv, 128)
    bfloat16. sample_lse: (B, H, S_q) float32, natural logarithm. Errors say q_tensor for sample_q, and so on.

    is_causal: takes S_q == S_kv only.
    softmax_scale: None is 1 / sqrt(128).
    backend: "auto" and "attn_qat" are this library; cuDNN's "frost" and "triton" raise NotImplementedError.
    head_chunk: 0, everything in one launch, or a divisor of H, one launch for so many heads of a batch entry.
    workspace_limit_bytes: NotImplementedError for a plan whose `scratch_workspace_bytes` is above it.
    """

    def __init__(
        self,
        sample_q: Tensor,
        sample_k: Tensor,
        sample_v: Tensor,
        sample_high_precision_o: Tensor,
        sample_do: Tensor,
        sample_lse: Tensor,
        *,
        is_causal: bool = False,
        softmax_scale: float | None = None,
        backend: str = "auto",
        head_chunk: int = 0,
        workspace_limit_bytes: int | None = None,
    ):
        self._q = Operand.of("q_tensor", sample_q)
        self._k = Operand.of("k_tensor", sample_k)
        self._v = Operand.of("v_tensor", sample_v)
        self._high_precision_o = Operand.of("high_precision_o_tensor", sample_high_precision_o)
        self._do = Operand.of("do_tensor", sample_do)
        self._lse = Operand.of("lse_tensor", sample_lse)
        check_is_causal(is_causal)
        self.is_causal = is_causal
        self.softmax_scale = None if softmax_scale is None else softmax_scale_of(softmax_scale)
        self.backend = backend
        self.head_chunk = head_chunk
        self.workspace_limit_bytes = workspace_limit_bytes
        self._supported = False
        self._kernel_workspace_bytes = 0
        self._compiled_kernel = None  # the parts that execute launches; cuDNN frontend's tests read this name

    @property
    def selected_backend(self) -> str | None:
        """None before `check_support`, then "attn_qat", which `backend` takes as well."""
        return OWN_BACKEND if self._supported else None

    @property
    def selected_head_chunk(self) -> int:
        """Heads in one launch; 0 before `check_support`."""
        return (self.head_chunk or self._q.shape[1]) if self._supported else 0

    @property
    def fallback_reason(self) -> str | None:
        """Always None: there is one implementation, and none to fall back to."""
        return None

    def check_support(self) -> bool:
        """True, or an error that says why not.

        ValueError: a bad argument. RuntimeError: tensors neither on a CPU nor on CUDA. NotImplementedError: a
        GPU without kernels in this build, a backend that is not here, a workspace above the limit.
        """
        if self._supported:
            return True
        check_options(self.backend, self.head_chunk, self.workspace_limit_bytes)
        self._check_samples()
        if self.softmax_scale is None:
            self.softmax_scale = HEAD_DIM**-0.5
        check_softmax_scale(self.softmax_scale)
        check_backend_is_here(self.backend)
        self._kernel_workspace_bytes = self._query_workspace_bytes()
        limit, required = self.workspace_limit_bytes, self._scratch_bytes()
        if limit is not None and required > limit:
            raise NotImplementedError(f"workspace_limit_bytes is {limit}, this problem takes {required}")
        self._supported = True
        return True

    def _check_samples(self) -> None:
        q, k, v, lse = self._q, self._k, self._v, self._lse
        like_q = self._high_precision_o, self._do
        for operand in (q, k, v, *like_q):
            operand.check_declaration("(B, H, S, D)", torch.bfloat16)
        lse.check_declaration("(B, H, S_q)", torch.float32)
        for operand in (q, k):
            if 0 in operand.shape[:3]:
                raise ValueError(f"{operand.name} has shape {operand.shape}, takes at least 1 of B, H and S")
            if operand.shape[3] != HEAD_DIM:
                raise ValueError(f"{operand.name} has head dim {operand.shape[3]}, takes {HEAD_DIM}")
        heads, chunk = q.shape[1], self.head_chunk
        if chunk and heads % chunk:
            raise ValueError(f"head_chunk is {chunk}, takes 0 or a number that divides the {heads} heads")
        k.check_shape((*q.shape[:2], *k.shape[2:]), "with the batch and heads of q_tensor")
        v.check_shape(k.shape, "that of k_tensor")
        for operand in like_q:
            operand.check_shape(q.shape, "that of q_tensor")
        lse.check_shape(q.shape[:3], "a value for each row of q_tensor")
        if self.is_causal and q.shape[2] != k.shape[2]:
            raise ValueError(
                "is_causal is True, and causal QAT backward requires equal lengths: "
                f"q_tensor has S_q {q.shape[2]}, k_tensor S_kv {k.shape[2]}"
            )
        check_device_is_served(q.device)
        for operand in (k, v, *like_q, lse):
            operand.check_device(q.device)

    def _query_workspace_bytes(self) -> int:
        # The size follows from shapes and device; one row, expanded, stands in for the tensor.
        row = torch.empty(1, 1, 1, HEAD_DIM, dtype=self._q.dtype, device=self._q.device)
        return ops.backward_workspace_bytes(row.expand(self._q.shape), row.expand(self._k.shape))

    def _scratch_bytes(self) -> int:
        # The caller aligns to 16 bytes, the kernels to 64: execute begins at the first such address.
        return self._kernel_workspace_bytes + KERNEL_ALIGNMENT - ALIGNMENT

    def scratch_workspace_bytes(self) -> int:
        """Size of the uint8 workspace of `execute`, the same for every head_chunk. Checks support first."""
        self.check_support()
        return self._scratch_bytes()

    def compile(self) -> None:
        """Fixes what `execute` launches; the kernels are in the library already. Checks support first."""
        self.check_support()
        batch, heads = self._q.shape[:2]
        chunk = self.selected_head_chunk
        if chunk == heads:
            self._compiled_kernel = (...,)
        else:  # one batch entry at a time keeps a part of lse contiguous
            self._compiled_kernel = tuple(
                (slice(b, b + 1), slice(h, h + chunk)) for b in range(batch) for h in range(0, heads, chunk)
            )

    @eager_only
    def execute(
        self,
        q_tensor: Tensor,
        k_tensor: Tensor,
        v_tensor: Tensor,
        high_precision_o_tensor: Tensor,
        do_tensor: Tensor,
        lse_tensor: Tensor,
        dq_tensor: Tensor,
        dk_tensor: Tensor,
        dv_tensor: Tensor,
        workspace: Tensor,
        *,
        softmax_scale: float | None = None,
        current_stream=None,
    ) -> None:
        """Writes the gradients into dq_tensor, dk_tensor and dv_tensor. Allocates and awaits nothing.

        workspace: uint8, one dimension, at least `scratch_workspace_bytes`. It and the gradients may overlap
        nothing.
        softmax_scale: for this call, in place of the plan's.
        current_stream: a torch.cuda.Stream, an object with `.cuda_stream` or `int()`, or a cudaStream_t as an
        integer; None is torch's current stream.

        RuntimeError before `compile`, TypeError for what is no tensor or stream, ValueError for a tensor that
        the plan was not made for.
        """
        if self._compiled_kernel is None:
            raise RuntimeError(
                "this Nvfp4AttentionQatBackward is not compiled, takes compile() before execute()"
            )
        read = {
            "do_tensor": do_tensor,
            "q_tensor": q_tensor,
            "k_tensor": k_tensor,
            "v_tensor": v_tensor,
            "high_precision_o_tensor": high_precision_o_tensor,
            "lse_tensor": lse_tensor,
        }
        written = {"dq_tensor": dq_tensor, "dk_tensor": dk_tensor, "dv_tensor": dv_tensor}
        inputs = self._do, self._q, self._k, self._v, self._high_precision_o, self._lse
        for operand, (name, x) in zip(inputs, read.items(), strict=True):
            operand.check_runtime(name, x)
        for operand, (name, x) in zip((self._q, self._k, self._v), written.items(), strict=True):
            operand.check_runtime(name, x)
        check_workspace(workspace, self._scratch_bytes(), self._q.device)
        start = -workspace.data_ptr() % KERNEL_ALIGNMENT
        workspace = workspace[start : start + self._kernel_workspace_bytes]
        check_disjoint({**written, "workspace": workspace}, read)
        scale = self.softmax_scale if softmax_scale is None else softmax_scale_of(softmax_scale)
        check_softmax_scale(scale)
        with on_stream(current_stream, self._q.device):
            for part in self._compiled_kernel:
                grads = (x[part] for x in written.values())
                self._launch([x[part] for x in read.values()], scale, workspace, *grads)

    def _launch(self, inputs, softmax_scale, workspace, dq, dk, dv) -> None:
        """The one call into the kernels. inputs: do, q, k, v, high_precision_o, lse."""
        ops.backward_out(
            *inputs, softmax_scale, self.is_causal, Recipe.CUDNN, None, workspace, dq=dq, dk=dk, dv=dv
        )

    def __call__(self, *args, **kwargs) -> None:
        """`execute`, after `compile` where that has not been called."""
        if self._compiled_kernel is None:
            self.compile()
        self.execute(*args, **kwargs)
