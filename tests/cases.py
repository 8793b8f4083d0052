"""Inputs shared by the tests: shapes, and seeded numbers that are the same on every device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attn_qat import reference

RECIPES = reference.RECIPES
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Shape:
    batch: int = 1
    heads_q: int = 2
    heads_kv: int = 2
    seq_q: int = 64
    seq_kv: int = 64
    head_dim: int = 64
    causal: bool = False

    def __str__(self) -> str:
        heads = f"h{self.heads_q}" + (f"/{self.heads_kv}" if self.heads_kv != self.heads_q else "")
        causal = "-causal" if self.causal else ""
        return f"b{self.batch}-{heads}-{self.seq_q}x{self.seq_kv}-d{self.head_dim}{causal}"


# Self and cross attention, whole tiles and tails, causal both ways round, grouped heads, all head dims.
SHAPES = (
    Shape(2, 3, 3, 64, 64, 64),
    Shape(1, 2, 2, 200, 200, 128),
    Shape(1, 2, 2, 129, 129, 64, causal=True),
    Shape(1, 2, 2, 160, 160, 128, causal=True),
    Shape(2, 2, 2, 33, 190, 64),
    Shape(1, 2, 2, 190, 31, 128),
    Shape(1, 2, 2, 17, 100, 64, causal=True),
    Shape(1, 2, 2, 100, 17, 64, causal=True),  # 83 rows see no key
    Shape(2, 8, 2, 65, 80, 64),
    Shape(1, 4, 1, 127, 127, 128, causal=True),
    Shape(1, 2, 2, 40, 72, 16),
    Shape(1, 2, 1, 72, 40, 48),
    Shape(1, 2, 2, 50, 50, 96, causal=True),
    Shape(1, 1, 1, 70, 90, 256),
)


@dataclass(frozen=True)
class Case:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor
    softmax_scale: float
    is_causal: bool

    def options(self, recipe: str):
        return self.softmax_scale, self.is_causal, recipe

    def forward_args(self, recipe: str):
        return self.q, self.k, self.v, *self.options(recipe)

    def backward_args(self, recipe: str, saved):
        """Arguments of backward after a forward that returned `saved`."""
        _, high_precision_out, lse, row_exponent = saved
        inputs = self.grad_out, self.q, self.k, self.v, high_precision_out, lse
        return *inputs, *self.options(recipe), row_exponent

    def half_args(self, recipe: str, saved):
        """Arguments of backward_dq and backward_dkdv."""
        _, high_precision_out, lse, row_exponent = saved
        delta = torch.ops.attn_qat.preprocess(high_precision_out, self.grad_out)
        return self.grad_out, self.q, self.k, self.v, lse, delta, *self.options(recipe), row_exponent

    def forward(self, recipe: str):
        return torch.ops.attn_qat.forward(*self.forward_args(recipe))

    def backward(self, recipe: str, saved=None):
        return torch.ops.attn_qat.backward(*self.backward_args(recipe, saved or self.forward(recipe)))

    def reference_forward(self, recipe: str, nudge: float = 0.0):
        """The float64 oracle, on the CPU. nudge: relative change of the scores."""
        return reference.forward(*self._on_cpu(nudge).forward_args(recipe))

    def reference_backward(self, recipe: str, saved, nudge: float = 0.0):
        return reference.backward(*self._on_cpu(nudge).backward_args(recipe, [x.cpu() for x in saved]))

    def _on_cpu(self, nudge: float) -> Case:
        return replace(self.map(torch.Tensor.cpu), softmax_scale=self.softmax_scale * (1 + nudge))

    def map(self, function) -> Case:
        """The case with function applied to q, k, v and grad_out."""
        names = ("q", "k", "v", "grad_out")
        return replace(self, **{name: function(getattr(self, name)) for name in names})


def _outlier_channel(x):
    x[..., 3] *= 50
    return x


KINDS = {  # name -> what is done to the unit normal q and k
    "random": lambda x: x,
    "peaked": lambda x: x * 3,  # one or two keys take most of a row
    "diffuse": lambda x: x * 0.05,  # every key takes about the same
    "tailed": lambda x: x * (x.abs() / 2).exp() / 2,  # heavy tails: block scales differ widely
    "outlier": _outlier_channel,  # one channel sets the scale of its block
    "extreme": lambda x: x * 30,  # scores in the thousands: one key takes all
}


def make_case(shape: Shape, device="cpu", dtype=torch.bfloat16, kind: str = "random", seed: int = 0) -> Case:
    """Drawn on the CPU, then moved to the device."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads, length):
        return torch.randn(shape.batch, heads, length, shape.head_dim, generator=generator)

    q, k = draw(shape.heads_q, shape.seq_q), draw(shape.heads_kv, shape.seq_kv)
    v, grad_out = draw(shape.heads_kv, shape.seq_kv), draw(shape.heads_q, shape.seq_q)
    case = Case(KINDS[kind](q), KINDS[kind](k), v, grad_out, shape.head_dim**-0.5, shape.causal)
    return case.map(lambda x: x.to(device, dtype))


def as_bshd(x: torch.Tensor) -> torch.Tensor:
    """The same (B, H, S, D) values in memory laid out as (B, S, H, D)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
