"""Which scaled_dot_product_attention calls attn-qat takes, why not the others, and what becomes of a call.

Every integration calls attention here, and only here.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from .. import ops
from .._fake import DTYPES, MAX_HEAD_DIM
from ..autograd import attention
from ..recipe import Recipe


def _say(words: str, *numbers) -> str:
    """The reason in words, without numbers while torch.compile traces: symbols have no text."""
    return words.format(*(["..."] * len(numbers) if torch.compiler.is_compiling() else numbers))


def why_not(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str | None:
    """Why attn-qat does not take this scaled_dot_product_attention call; None if it does.

    Looks at types, shapes, strides and, where it is not traced, alignment; never at values. Whether a GPU
    has a kernel for the call is another question: `why_no_kernel`.
    """
    if attn_mask is not None:
        return "attn_mask is given, takes None"
    if dropout_p != 0.0:
        return _say("dropout_p is {}, takes 0", dropout_p)
    if scale is not None and not 0.0 < scale < math.inf:
        return _say("scale is {}, takes a finite positive number", scale)
    return _why_not_tensors(query, key, value) or _why_not_shapes(query, key, value, is_causal, enable_gqa)


def _why_not_tensors(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.is_nested:
            return f"{name} is a nested tensor, takes a strided one"
        if x.dim() != 4:
            return f"{name} has {x.dim()} dimensions, takes 4: (batch, heads, sequence, head_dim)"
        if x.device.type not in ("cpu", "cuda", "meta"):
            return f"{name} is on {x.device}, takes cpu or cuda"
        aligned = 16 // x.element_size()
        if x.stride(3) != 1 or any(x.stride(i) % aligned != 0 for i in range(3) if x.shape[i] != 1):
            return _say(
                name + " has strides {}, {}, {}, {}, takes contiguous rows at multiples of 16 bytes",
                *x.stride(),
            )
        if not torch.compiler.is_compiling() and x.storage_offset() % aligned != 0:  # not to be traced
            return f"{name} starts at an address that is no multiple of 16 bytes, takes one that is"
        if x.dtype not in DTYPES:
            return f"{name} has dtype {x.dtype}, takes bfloat16, float16 or float32"
    if torch.is_autocast_enabled(query.device.type):
        return None
    if key.dtype != query.dtype or value.dtype != query.dtype:
        return f"query, key, value have dtypes {query.dtype}, {key.dtype}, {value.dtype}, takes one dtype"
    return None


def _why_not_shapes(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, enable_gqa: bool
) -> str | None:
    batch, heads, queries, head_dim = query.shape
    kv_heads, keys = key.shape[1:3]
    if head_dim % 16 != 0 or head_dim > MAX_HEAD_DIM:
        return _say("query has head_dim {}, takes a multiple of 16 up to {}", head_dim, MAX_HEAD_DIM)
    for name, x in (("key", key), ("value", value)):
        # Not broadcast, as torch's own function would
        if x.shape[0] != batch or x.shape[1] != kv_heads or x.shape[2] != keys or x.shape[3] != head_dim:
            words = name + " has shape ({}, {}, {}, {}), takes ({}, {}, {}, {})"
            return _say(words, *x.shape, batch, kv_heads, keys, head_dim)
    if kv_heads != heads and not enable_gqa:
        return _say("key has {} heads and query {}, takes enable_gqa=True for that", kv_heads, heads)
    if heads % kv_heads != 0 if kv_heads > 0 else heads != 0:
        return _say("key has {} heads, takes a number that divides query's {}", kv_heads, heads)
    if is_causal and queries != keys:
        return _say(
            "is_causal with {} queries and {} keys, takes equal lengths: scaled_dot_product_attention aligns "
            "the mask top-left, attn-qat bottom-right",
            queries,
            keys,
        )
    return None


@functools.cache
def _why_no_cuda_kernel(device: torch.device, dtype: torch.dtype, head_dim: int, causal: bool, recipe: str):
    q = torch.zeros(1, 1, 1, head_dim, device=device, dtype=dtype)
    try:
        ops.forward(q, q, q, 1.0, causal, recipe)
    except NotImplementedError as error:
        return str(error)
    return None


def traced_why_no_cuda_kernel(*problem) -> str | None:
    """For torch.compile to run while tracing, if marked so; it does not enter the cache."""
    return _why_no_cuda_kernel(*problem)


def why_no_kernel(query: Tensor, is_causal: bool, recipe: str | Recipe) -> str | None:
    """Why this GPU has no kernel for the call; None if it has. The CPU takes all that `why_not` lets pass.

    Runs the smallest such problem, once for each kind of problem and process: only the library knows.
    """
    device = query.device
    if device.type != "cuda":
        return None
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
    # One of the few numbers it can be, for a tracer to which the shape is a symbol.
    head_dim = next(size for size in range(16, MAX_HEAD_DIM + 1, 16) if size == query.shape[3])
    return traced_why_no_cuda_kernel(device, dtype, head_dim, is_causal, str(recipe))


def attend(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None, recipe: str | Recipe
) -> Tensor:
    """The one place where an integration calls attn-qat. Causal masks align bottom-right."""
    return attention(query, key, value, is_causal=is_causal, softmax_scale=scale, recipe=recipe)
