"""Checks of what is no tensor: options, softmax_scale, and whether this build has kernels for a device."""

from __future__ import annotations

import ctypes
import functools
import math

import torch

from .._library import build_info

OWN_BACKEND = "attn_qat"
FOREIGN_BACKENDS = ("frost", "triton")


def check_options(backend, head_chunk, workspace_limit_bytes) -> None:
    """Sizes are of type int itself: True is none."""
    if backend not in ("auto", OWN_BACKEND, *FOREIGN_BACKENDS):
        raise ValueError(f"backend is {backend!r}, takes 'auto' or '{OWN_BACKEND}'")
    if type(head_chunk) is not int or head_chunk < 0:
        raise ValueError(f"head_chunk is {head_chunk!r}, takes a nonnegative integer")
    limit = workspace_limit_bytes
    if limit is not None and (type(limit) is not int or limit < 0):
        raise ValueError(f"workspace_limit_bytes is {limit!r}, takes a nonnegative integer or None")


def check_backend_is_here(backend: str) -> None:
    if backend in FOREIGN_BACKENDS:
        raise NotImplementedError(
            f"backend is '{backend}', an implementation that cuDNN frontend has and attn_qat has not; "
            f"takes 'auto' or '{OWN_BACKEND}'"
        )


def check_is_causal(is_causal) -> None:
    if type(is_causal) is not bool:
        raise ValueError(f"is_causal is {is_causal!r}, takes True or False")


def softmax_scale_of(softmax_scale) -> float:
    """A number of any kind as a float."""
    try:
        return float(softmax_scale)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"softmax_scale is {softmax_scale!r}, takes a finite positive number") from None


def check_softmax_scale(softmax_scale: float) -> None:
    used = ctypes.c_float(softmax_scale).value  # the kernels multiply in FP32
    if not 0.0 < used < math.inf:
        raise ValueError(f"softmax_scale is {softmax_scale:g}, takes a finite positive number")


@functools.cache
def cuda_targets() -> tuple[str, ...]:
    return tuple(build_info()["targets"])


def check_device_is_served(device: torch.device) -> None:
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise RuntimeError(f"q_tensor is on {device}, takes CPU or CUDA tensors")
    major, minor = torch.cuda.get_device_capability(device)
    if f"sm_{major}{minor}a" not in cuda_targets():
        raise NotImplementedError(
            f"q_tensor is on {device} of compute capability {major}.{minor}, "
            f"takes a device that this build has kernels for: {' '.join(cuda_targets()) or 'CPU only'}"
        )
