"""How far an implementation is from the float64 reference of what it claims to compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from attn_qat import reference
from peers.base import PLAIN
from problem import ATTENTION, OUTPUTS, Problem
from torch import Tensor

# Longest sequence whose S x S matrices the reference materialises: in float64, one head at a time, and about
# eight of them at once.
LONGEST = {"cpu": 2048, "cuda": 32768}
CONTRACT = 6e-3  # what this package promises: relative Frobenius error of every output


@dataclass(frozen=True)
class Accuracy:
    errors: dict[str, float]  # by output
    seq: int  # length it was measured at
    heads: int  # of batch * heads, the first and the last

    @property
    def worst(self) -> float:
        return max(self.errors.values(), key=lambda e: float("inf") if e != e else e)


def checkable(problem: Problem) -> Problem:
    """The problem itself, or a shorter one where the reference would not fit."""
    longest = LONGEST[problem.device.type]
    too_long = problem.op in ATTENTION and problem.case.seq > longest
    return problem.with_seq(longest) if too_long else problem


def measure(call: Callable[[], tuple[Tensor, ...]], problem: Problem, computes: str) -> Accuracy:
    """Relative Frobenius errors of the outputs, over the first and the last head."""
    outputs = [x.detach() for x in call()]
    batch, heads = problem.case.batch, problem.case.heads
    chosen = sorted({(0, 0), (batch - 1, heads - 1)})
    difference, norm = [0.0] * len(outputs), [0.0] * len(outputs)
    for b, h in chosen:
        one_head = {name: x[b : b + 1, h : h + 1] for name, x in problem.tensors.items()}
        got = [x[b : b + 1, h : h + 1].double() for x in _comparable(problem, outputs)]
        for i, (have, want) in enumerate(zip(got, _exact(problem, one_head, computes), strict=True)):
            difference[i] += (have - want).square().sum().item()
            norm[i] += want.square().sum().item()
    errors = [(d / n) ** 0.5 if d else 0.0 for d, n in zip(difference, norm, strict=True)]
    names = OUTPUTS[problem.op] if len(errors) == len(OUTPUTS[problem.op]) else ("values",)
    return Accuracy(dict(zip(names, errors, strict=True)), problem.case.seq, len(chosen))


def _comparable(problem: Problem, outputs: list[Tensor]) -> list[Tensor]:
    """Packed numbers are judged by the values they stand for."""
    if problem.op == "quantize" and len(outputs) == 2:
        return [reference.dequantize(*outputs, torch.float32)]
    return outputs


def _exact(problem: Problem, tensors: dict[str, Tensor], computes: str) -> tuple[Tensor, ...]:
    """The outputs in float64."""
    if problem.op in ATTENTION:
        return _exact_attention(problem, tensors, computes)
    if problem.op == "preprocess":
        return (reference.preprocess(tensors["o"], tensors["grad_out"]),)
    return (reference.fake_quantize(tensors["x"]).double(),)


def _exact_attention(problem: Problem, tensors: dict[str, Tensor], computes: str) -> tuple[Tensor, ...]:
    needs_gradients = problem.op != "forward"
    q, k, v = (tensors[name].double().requires_grad_(needs_gradients) for name in ("q", "k", "v"))
    options = {"is_causal": problem.case.causal, "softmax_scale": problem.softmax_scale}
    if computes == PLAIN:
        out = _plain_attention(q, k, v, **options)
    else:
        out = reference.attention(q, k, v, recipe=computes, **options)
    if not needs_gradients:
        return (out,)
    gradients = torch.autograd.grad(out, (q, k, v), tensors["grad_out"].double())
    return gradients if problem.op == "backward" else (out.detach(), *gradients)


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, softmax_scale: float) -> Tensor:
    s = (q @ k.mT) * softmax_scale
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -torch.inf)
    return s.softmax(-1) @ v
