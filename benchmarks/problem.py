"""One operator on one case: the tensors that every implementation of a run gets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import attn_qat
import torch
from cases import Case
from torch import Tensor

# What a callable returns for each operator, in order.
OUTPUTS = {
    "forward": ("out",),
    "backward": ("dq", "dk", "dv"),
    "forward_backward": ("out", "dq", "dk", "dv"),
    "fake_quantize": ("values",),
    "quantize": ("data", "scales"),
    "preprocess": ("delta",),
}
ATTENTION = ("forward", "backward", "forward_backward")


@dataclass(frozen=True)
class Problem:
    op: str
    case: Case
    recipe: str
    dtype: torch.dtype
    device: torch.device
    inputs: str = "random"  # or "quantized"
    tensors: dict[str, Tensor] = field(default_factory=dict, repr=False)  # in the order of _names

    @property
    def softmax_scale(self) -> float:
        return self.case.head_dim**-0.5

    def with_recipe(self, recipe: str) -> Problem:
        """The same tensors under another recipe."""
        return replace(self, recipe=recipe)

    def with_seq(self, seq: int) -> Problem:
        """New tensors of another length."""
        return replace(self, case=self.case.with_seq(seq), tensors={}).filled()

    def filled(self, seed: int = 0) -> Problem:
        """With unit normal tensors, drawn on the device. inputs "quantized": q, k, v as NVFP4 holds them."""
        generator = torch.Generator(self.device).manual_seed(seed)
        tensors = {}
        for name in self._names():
            x = torch.empty(self.case.shape, dtype=self.dtype, device=self.device)
            tensors[name] = x.normal_(generator=generator)
        if self.inputs == "quantized" and self.op in ATTENTION:
            for name in ("q", "k", "v"):
                axis = -2 if name == "v" and self.recipe == "fp4" else -1
                if name != "v" or self.recipe != "fp4_qk":
                    tensors[name] = attn_qat.fake_quantize(tensors[name], axis)
        return replace(self, tensors=tensors)

    def _names(self) -> tuple[str, ...]:
        # o: high_precision_out
        if self.op in ATTENTION:
            return "q", "k", "v", "grad_out"
        return ("o", "grad_out") if self.op == "preprocess" else ("x",)
