"""What an adapter offers, and the calls that every differentiable attention function shares."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch
from problem import ATTENTION, Problem
from torch import Tensor

PLAIN = "plain"  # attention without quantisation


class Peer:
    """One implementation.

    A call returns a tuple of tensors, (batch, heads, seq, head_dim), as problem.OUTPUTS orders them. What it
    needs beforehand (a forward, a copy into another layout, compilation) happens in `prepare`, untimed.
    """

    name: str
    distribution: str | None = None  # the installed package that `version` reports
    computes: str | None = None  # PLAIN, a fixed recipe, or None: the recipe of the problem

    def why_not(self, problem: Problem) -> str | None:
        """The end of a sentence "It ..." if it cannot run this problem here."""
        raise NotImplementedError

    def prepare(self, problem: Problem) -> Callable[[], tuple[Tensor, ...]]:
        """A callable that does the operator once. May raise with the reason why not."""
        raise NotImplementedError

    def version(self) -> str | None:
        try:
            return version(self.distribution) if self.distribution else None
        except PackageNotFoundError:
            return None


def not_attention(problem: Problem) -> str | None:
    return None if problem.op in ATTENTION else f"has no {problem.op}"


def not_on_cuda(problem: Problem) -> str | None:
    return None if problem.device.type == "cuda" else "runs on CUDA only"


def not_in(dtypes: tuple[torch.dtype, ...], problem: Problem) -> str | None:
    if problem.dtype in dtypes:
        return None
    return f"takes {' or '.join(str(d).removeprefix('torch.') for d in dtypes)}"


def missing(module: str) -> str | None:
    """Why a package cannot be imported, or None."""
    try:
        __import__(module)
    except Exception as error:  # packages fail in their own ways where their hardware or libraries are absent
        first_line = next(iter(str(error).splitlines()), "")
        return f"cannot be imported as {module}: {type(error).__name__}: {first_line}"
    return None


def differentiable(attention: Callable, problem: Problem, bshd: bool = False) -> Callable:
    """Calls of attention(q, k, v) -> out by autograd. bshd: in (batch, seq, heads, head_dim) memory."""
    turn = (lambda x: x.transpose(1, 2)) if bshd else (lambda x: x)
    q, k, v, grad_out = (turn(x).contiguous() for x in problem.tensors.values())
    if problem.op == "forward":

        def forward():
            with torch.no_grad():
                return (turn(attention(q, k, v)),)

        return forward

    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    if problem.op == "backward":
        out = attention(*inputs)
        return lambda: tuple(map(turn, torch.autograd.grad(out, inputs, grad_out, retain_graph=True)))

    def forward_backward():
        out = attention(*inputs)
        return tuple(map(turn, (out.detach(), *torch.autograd.grad(out, inputs, grad_out))))

    return forward_backward
