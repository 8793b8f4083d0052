"""Sharding rules: how the operators run on DTensors, without gathering where they need not.

They are registered by themselves when torch.distributed.tensor is imported, before or after attn_qat.

Attention is independent for each batch entry and for each kv head with its group of query heads: tensors
sharded on batch (dimension 0) or heads (dimension 1) are attended to where they lie. Along the sequence and
the head dimension an operator sees everything: what is sharded there, DTensor gathers first.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from itertools import combinations
from math import prod

import torch

_DTENSOR = "torch.distributed.tensor"
_registered = False


def register() -> None:
    """Registers the rules of every operator but those that take plain tensors only: `backward.out`,
    `backward_workspace_bytes` and `explain`.

    Imports DTensor. Called when DTensor is imported; a second call does nothing.
    """
    global _registered
    from torch.distributed.tensor.experimental import register_sharding  # may register, by the hook below

    if _registered:
        return
    _registered = True
    ops = torch.ops.attn_qat
    attention = (ops.forward, ops.infer, ops.infer_with_lse, ops.preprocess)
    attention += (ops.backward, ops.backward_dq, ops.backward_dkdv)
    for op in attention:
        register_sharding(op.default)(_attention_rule(len(op.default._schema.returns)))
    register_sharding(ops.fake_quantize.default)(_fake_quantize_rule)
    register_sharding(ops.quantize.default)(_quantize_rule)
    register_sharding(ops.dequantize.default)(_dequantize_rule)


# --- the rules: (placements of the outputs, placements of the arguments) for one dimension of the mesh ------


def _placement(dim: int | None):
    from torch.distributed.tensor import Replicate, Shard

    return Replicate() if dim is None else Shard(dim)


def _is_tensor(argument) -> bool:
    return hasattr(argument, "placements")  # DTensor describes a tensor by its shape, mesh and placements


def _inputs(arguments, dim: int | None, whole=None) -> list:
    """Tensors sharded on dim, except `whole`, which every rank has; None for what is no tensor."""
    return [
        _placement(None if argument is whole else dim) if _is_tensor(argument) else None
        for argument in arguments
    ]


def _attention_rule(outputs: int):
    def rule(*arguments, **options):
        arguments = (*arguments, *options.values())
        tensors = [argument for argument in arguments if _is_tensor(argument)]
        # All are (B, H, S, ...). Replicate comes first: among placements that cost nothing DTensor takes the
        # first.
        dims = [None, 0, 1] if _heads_divide(tensors) else [None, 0]
        return [([_placement(dim)] * outputs, _inputs(arguments, dim)) for dim in dims]

    return rule


def _heads_divide(tensors) -> bool:
    """Whichever dimensions of the mesh DTensor then puts the heads on, they divide evenly.

    If they did not, a rank would hold query heads of other groups than its kv heads: wrong numbers without an
    error.
    """
    heads_kv = min(tensor.shape[1] for tensor in tensors)
    mesh = tensors[0].mesh.shape
    on_heads = _shards_that_stay(tensors)
    if on_heads > 1 and heads_kv % on_heads == 0:
        return True
    # Any set of dimensions may come to hold the heads; DTensor itself rules out more shards than heads.
    shards = [prod(some) for n in range(1, len(mesh) + 1) for some in combinations(mesh, n)]
    return all(heads_kv % count == 0 for count in shards if count <= heads_kv)


def _shards_that_stay(tensors) -> int:
    """Over how many shards the heads are and remain, or 0 where DTensor will have to move a tensor.

    It moves none where each dimension of the mesh shards all tensors alike, on batch or heads, or replicates
    them.
    """
    on_heads = on_batch = 1
    for size, placements in zip(tensors[0].mesh.shape, zip(*(tensor.placements for tensor in tensors))):
        sharded = {placement for placement in placements if not placement.is_replicate()}
        if not sharded:
            continue
        first = sharded.pop()
        if sharded or not (first.is_shard(0) or first.is_shard(1)):
            return 0
        if first.is_shard(1):
            on_heads *= size
        else:
            on_batch *= size
    return on_heads if tensors[0].shape[0] >= on_batch else 0


def _fake_quantize_rule(x, axis=-1, global_scale=None):
    free = [dim for dim in range(x.ndim) if dim != axis % x.ndim]
    return [([_placement(dim)], _inputs((x, axis, global_scale), dim, global_scale)) for dim in [None, *free]]


def _packed_dims(ndim: int, axis: int, tiled_scales: bool) -> list[tuple[int | None, int | None]]:
    """(dimension of the values, the same of the packed form) that cut neither a block nor a tile of scales."""
    dims = [(None, None), *((dim, dim) for dim in range(ndim - 2))]
    if ndim > 1 and not tiled_scales:
        dims.append((ndim - 2 if axis % ndim == ndim - 1 else ndim - 1, ndim - 2))
    return dims


def _quantize_rule(x, axis=-1, global_scale=None, tiled_scales=False):
    arguments = (x, axis, global_scale, tiled_scales)
    return [
        ([_placement(packed)] * 2, _inputs(arguments, dim, global_scale))
        for dim, packed in _packed_dims(x.ndim, axis, tiled_scales)
    ]


def _dequantize_rule(data, scales, dtype, axis=-1, global_scale=None, tiled_scales=False):
    arguments = (data, scales, dtype, axis, global_scale, tiled_scales)
    return [
        ([_placement(dim)], _inputs(arguments, packed, global_scale))
        for dim, packed in _packed_dims(data.ndim, axis, tiled_scales)
    ]


# --- registration when DTensor is imported ------------------------------------------------------------------


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds nothing itself: lets DTensor be imported as ever and registers the rules once it is."""

    def find_spec(self, name, path=None, target=None):
        if name != _DTENSOR:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None:  # a torch without distributed
            return None
        load = spec.loader.exec_module

        def load_and_register(module):
            load(module)
            register()

        spec.loader.exec_module = load_and_register
        return spec


def register_with_dtensor() -> None:
    """`register` now if DTensor is imported, else as soon as it is: importing it takes 0.5 s."""
    if _DTENSOR in sys.modules:
        register()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
