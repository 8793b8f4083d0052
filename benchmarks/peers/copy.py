"""A copy of the input: what the memory gives, beside the operators that only move memory."""

from __future__ import annotations

import torch
from problem import ATTENTION, Problem

from .base import PLAIN, Peer


class Copy(Peer):
    name = "copy"
    computes = PLAIN

    def why_not(self, problem: Problem) -> str | None:
        return "is a yardstick for operators that only move memory" if problem.op in ATTENTION else None

    def version(self) -> str:
        return torch.__version__

    def prepare(self, problem: Problem):
        source = next(iter(problem.tensors.values()))
        target = torch.empty_like(source)
        return lambda: (target.copy_(source),)


PEERS = (Copy(),)
