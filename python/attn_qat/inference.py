"""Inference: `infer`, and `infer_kernel`, which says what a device would run it with.

Training and inference share a recipe; `pv_mode` is what FP4 inference engines call it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from ._library import build_info
from .ops import _call, autocast, default_softmax_scale
from .recipe import Recipe

# How P V is computed -> the recipe that trains for it.
PV_MODES = {"fp4": Recipe.FP4, "bf16": Recipe.FP4_QK}


def recipe_of(pv_mode: str) -> Recipe:
    """The training recipe whose forward an inference in this mode repeats, bit for bit.

    Raises ValueError for a mode that does not exist and NotImplementedError for 'fp8', which exists
    elsewhere: V cast to E4M3 without a scale, for which there is neither a kernel here nor a recipe that
    trains for it.
    """
    if pv_mode == "fp8":
        raise NotImplementedError("pv_mode is 'fp8': no kernel and no recipe for it; takes 'fp4' or 'bf16'")
    if pv_mode not in PV_MODES:
        raise ValueError(f"pv_mode is {pv_mode!r}, takes 'fp4' or 'bf16'")
    return PV_MODES[pv_mode]


def infer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    pv_mode: str = "fp4",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention exactly as FP4 tensor cores compute it, without what only a backward needs.

    q: (B, Hq, Sq, D). k, v: (B, Hkv, Skv, D) with Hq a multiple of Hkv. Returns out, (B, Hq, Sq, D) in q's
    dtype, and with `return_lse` (out, lse): lse (B, Hq, Sq) float32, natural logarithm, -inf for a row that
    sees no key.
    pv_mode: 'fp4' quantises P and V (a model trained with recipe fp4), 'bf16' neither (trained with fp4_qk);
    Q and K are FP4 in both. `out` has the bits of `attn_qat.forward`'s with that recipe, from the same kernel
    family.
    softmax_scale: defaults to D ** -0.5. is_causal aligns bottom-right when Sq != Skv. No gradient:
    `attention` has one. Under autocast, q, k and v are cast to the autocast dtype. Raises ValueError for
    anything it does not take and NotImplementedError where there is no kernel; it never computes another
    attention instead.
    """
    recipe = recipe_of(pv_mode)
    q, k, v = autocast(q, k, v)
    if softmax_scale is None:
        softmax_scale = default_softmax_scale(q)
    op = torch.ops.attn_qat.infer_with_lse if return_lse else torch.ops.attn_qat.infer
    return _call(op, q, k, v, softmax_scale, is_causal, str(recipe))


@dataclass(frozen=True)
class InferReceipt:
    """What `infer` runs on a device in a mode, and why nothing else; `str` is one line."""

    op: str  # "attn_qat::infer"
    recipe: Recipe
    pv_mode: str
    device: str  # as torch writes it: "cpu", "cuda:0"
    target: str  # what kernels are compiled for: "cpu", "sm_90a"; "none" without such a device
    kernel: str | None  # the kernel family, or None: a call raises NotImplementedError
    why_not: tuple[str, ...] = ()  # one sentence for each family that was not taken

    @property
    def available(self) -> bool:
        return self.kernel is not None

    def __str__(self) -> str:
        fields = (
            f"op={self.op} recipe={self.recipe} qk_mode=nvfp4(per-16-e4m3) pv_mode={self.pv_mode} "
            f"device={self.device} arch={self.target} kernel={self.kernel or 'none'}"
        )
        return f"{fields} ({'; '.join(self.why_not)})" if self.why_not else fields


def infer_kernel(device: torch.device | str | None = None, pv_mode: str = "fp4") -> InferReceipt:
    """Which kernel family `infer` would run on `device` in `pv_mode`. Runs nothing; no device makes it raise.

    device: the current CUDA device if torch sees one, else the CPU. Whether the family takes a given problem
    (dtype, head dim) is decided at the call. Raises as `recipe_of` does for a wrong pv_mode.
    """
    recipe = recipe_of(pv_mode)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    target, kernel, why_not = resolve(device)
    return InferReceipt("attn_qat::infer", recipe, pv_mode, _name(device), target, kernel, why_not)


def _name(device: torch.device) -> str:
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return f"cuda:{torch.cuda.current_device()}"
    return str(device)


def _capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability, or None where torch sees no such device."""
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        return None
    return torch.cuda.get_device_capability(device)


def resolve(device: torch.device, part: str = "forward") -> tuple[str, str | None, tuple[str, ...]]:
    """(target, kernel family, a sentence for each family not taken) for 'forward' or 'backward' on a device.

    For a device in general, and without touching it; `explain` asks the operators' dispatch table for one
    problem.
    """
    if device.type == "cpu":
        return "cpu", "cpu", ()
    if device.type != "cuda":
        return "none", None, (f"operators exist for cpu and cuda, not for {device.type}",)
    capability = _capability(device)
    if capability is None:
        return "none", None, (f"torch sees no device {_name(device)}",)
    target = f"sm_{capability[0]}{capability[1]}a"
    families = _families(part)
    if not families:
        return target, None, ("this build has no CUDA kernels",)
    chosen = next((name for name, targets in families.items() if target in targets), None)
    others = [name for name in families if name != chosen]
    return target, chosen, tuple(_sentence(name, families[name], target) for name in others)


def _sentence(family: str, targets: list[str], target: str) -> str:
    if target in targets:
        return f"{family}: a more specific family comes first"
    return f"{family}: no code for {target}, compiled for {' '.join(targets)}"


def _families(part: str) -> dict[str, list[str]]:
    """Kernel family with that part -> its targets, the most specific first, as the operators try them."""
    only = os.environ.get("ATTN_QAT_KERNELS")
    found = {
        source.split("/")[0]: targets
        for source, targets in build_info()["kernels"].items()
        if source.split("/")[1].startswith(part) and (not only or source.startswith(only + "/"))
    }
    return dict(sorted(found.items(), key=lambda item: len(item[1])))
