"""Checks of tensors: what the operator takes, what a plan was made for, and what may not overlap."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes, of every address the caller gives


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def require_tensor(name: str, x) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is of type {type(x).__name__}, takes a torch.Tensor")


def check_address(name: str, x: Tensor) -> None:
    if x.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"{name} starts at an address that is no multiple of {ALIGNMENT} bytes, takes one that is"
        )


@dataclass(frozen=True)
class Operand:
    """What a plan knows of a tensor. It holds no storage: a plan keeps no sample alive."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...]
    contiguous: bool

    @classmethod
    def of(cls, name: str, x: Tensor) -> Operand:
        require_tensor(name, x)
        return cls(name, tuple(x.shape), x.dtype, x.device, tuple(x.stride()), x.is_contiguous())

    def check_declaration(self, dims: str, dtype: torch.dtype) -> None:
        """The rank, dtype and layout that the operator takes, whatever the sizes. dims: "(B, H, S)", say."""
        rank = dims.count(",") + 1
        if len(self.shape) != rank:
            raise ValueError(f"{self.name} has shape {self.shape}, takes {rank} dimensions: {dims}")
        if self.dtype != dtype:
            raise ValueError(f"{self.name} has dtype {dtype_name(self.dtype)}, takes {dtype_name(dtype)}")
        if not self.contiguous:
            raise ValueError(f"{self.name} has strides {self.stride}, takes contiguous {dims} storage")

    def check_shape(self, shape: tuple[int, ...], why: str) -> None:
        if self.shape != shape:
            raise ValueError(f"{self.name} has shape {self.shape}, takes {shape}, {why}")

    def check_device(self, device: torch.device) -> None:
        if self.device != device:
            raise ValueError(f"{self.name} is on {self.device}, takes {device}, where q_tensor is")

    def check_runtime(self, name: str, x: Tensor) -> None:
        """x is what the plan was made for. Strides of dimensions of size 1 address nothing and are free."""
        require_tensor(name, x)
        if tuple(x.shape) != self.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, this plan takes {self.shape}")
        if x.dtype != self.dtype:
            raise ValueError(
                f"{name} has dtype {dtype_name(x.dtype)}, this plan takes {dtype_name(self.dtype)}"
            )
        if not x.is_contiguous():
            raise ValueError(f"{name} has strides {tuple(x.stride())}, this plan takes {self.stride}")
        if x.device != self.device:
            raise ValueError(f"{name} is on {x.device}, this plan takes {self.device}")
        check_address(name, x)


def check_workspace(workspace: Tensor, required: int, device: torch.device) -> None:
    require_tensor("workspace", workspace)
    if workspace.dtype != torch.uint8:
        raise ValueError(f"workspace has dtype {dtype_name(workspace.dtype)}, takes uint8")
    if workspace.dim() != 1:
        raise ValueError(f"workspace has shape {tuple(workspace.shape)}, takes one dimension")
    if not workspace.is_contiguous():
        raise ValueError(f"workspace has stride {workspace.stride(0)}, takes contiguous bytes")
    if workspace.device != device:
        raise ValueError(f"workspace is on {workspace.device}, this plan takes {device}")
    if workspace.numel() < required:
        raise ValueError(f"workspace must contain at least {required} bytes, has {workspace.numel()}")
    check_address("workspace", workspace)


def _span(x: Tensor) -> tuple[int, int]:
    """First address and one past the last of a contiguous tensor."""
    first = x.data_ptr()
    return first, first + x.numel() * x.element_size()


def check_disjoint(written: dict[str, Tensor], read: dict[str, Tensor]) -> None:
    """Written memory is nobody else's. What is only read may overlap: v may be k."""
    spans = {name: _span(x) for name, x in (written | read).items()}
    others = dict(spans)
    for name in written:
        first, end = others.pop(name)
        for other, (other_first, other_end) in others.items():
            if first < other_end and other_first < end:
                raise ValueError(
                    f"{name} overlaps {other} in memory, takes storage of its own: it is written"
                )
