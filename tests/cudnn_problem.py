"""What the tests of attn_qat.cudnn share: the inputs of one backward, and the call and plan on them."""

import math

import torch
from cases import Case, Shape, make_case
from contract import assert_same_bits

from attn_qat.cudnn import Nvfp4AttentionQatBackward, TupleDict, nvfp4_attention_qat_backward

SAMPLES = ("q_tensor", "k_tensor", "v_tensor", "high_precision_o_tensor", "do_tensor", "lse_tensor")
KEYS = ("dq_tensor", "dk_tensor", "dv_tensor")


def shape(batch=1, heads=2, seq_q=37, seq_kv=45, causal=False) -> Shape:
    return Shape(batch, heads, heads, seq_q, seq_kv, 128, causal)


class Problem:
    """Inputs of one backward, with what `attn_qat.forward` saved for it."""

    def __init__(self, shape: Shape, device, seed: int = 0):
        self.case: Case = make_case(shape, device, seed=seed)
        self.saved = self.case.forward("cudnn")
        self.inputs = {
            "q_tensor": self.case.q,
            "k_tensor": self.case.k,
            "v_tensor": self.case.v,
            "high_precision_o_tensor": self.saved[1],
            "do_tensor": self.case.grad_out,
            "lse_tensor": self.saved[2],
        }

    def plan(self, **options) -> Nvfp4AttentionQatBackward:
        return Nvfp4AttentionQatBackward(
            *self.inputs.values(), **{"is_causal": self.case.is_causal, **options}
        )

    def call(self, **options) -> TupleDict:
        return nvfp4_attention_qat_backward(**self.inputs, **{"is_causal": self.case.is_causal, **options})

    def want(self):
        """What the operator computes, called by its own name and without a row exponent."""
        return torch.ops.attn_qat.backward(*self.case.backward_args("cudnn", self.saved)[:-1])

    def grads(self) -> dict:
        return {key: torch.full_like(self.inputs[f"{key[1]}_tensor"], math.nan) for key in KEYS}


def workspace_for(plan, device, extra=0):
    return torch.empty(plan.scratch_workspace_bytes() + extra, dtype=torch.uint8, device=device)


def compiled(problem: Problem, **options):
    """A compiled plan, and the arguments of an `execute` that works."""
    plan = problem.plan(**options)
    plan.compile()
    workspace = workspace_for(plan, problem.case.q.device)
    return plan, {**problem.inputs, **problem.grads(), "workspace": workspace}


def assert_grads(got, want):
    for name, x, bits in zip(KEYS, got, want, strict=True):
        assert_same_bits(x, bits, name)
