"""FastVideo's attention backends ATTN_QAT_TRAIN and ATTN_QAT_INFER on this library's kernels.

`register()` makes FastVideo select them. The classes have the interface that FastVideo documents and derive
from its base classes where FastVideo is installed; the module imports, and the classes work, without it.

Tensors are BLHD, as everywhere in FastVideo: (batch, sequence length, heads, head dim). The kernels read such
a tensor where it lies; the output is copied once, into BLHD.
"""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from .. import attention, inference
from ..inference import PV_MODES, infer, infer_kernel, recipe_of
from ..recipe import Recipe
from . import missing

try:
    from fastvideo.attention.backends.abstract import AttentionBackend, AttentionImpl
except ModuleNotFoundError as error:
    if error.name != "fastvideo":  # FastVideo is there and lacks something itself
        raise
    AttentionBackend = AttentionImpl = object

# A child of FastVideo's logger, so that its configuration applies.
_logger = logging.getLogger("fastvideo.attn_qat")

HEAD_SIZES = (64, 128)


# --- which kernel -------------------------------------------------------------------------------------------


def active_device() -> torch.device:
    """The current CUDA device if torch sees one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def attn_qat_infer_receipt(pv_mode: str = "fp4") -> str:
    """One line: the kernel that ATTN_QAT_INFER runs on the active device, or why there is none."""
    return str(infer_kernel(active_device(), pv_mode))


def is_attn_qat_infer_available() -> bool:
    """The active device has a kernel for ATTN_QAT_INFER: more than that the library is importable."""
    return infer_kernel(active_device()).available


def attn_qat_train_receipt(recipe: str | Recipe = Recipe.FP4) -> str:
    """One line: the kernel that ATTN_QAT_TRAIN's backward runs on the active device, or why there is none."""
    target, kernel, why_not = inference.resolve(active_device(), "backward")
    line = f"op=attn_qat::backward recipe={Recipe(recipe)} device={active_device()} arch={target}"
    line += f" kernel={kernel or 'none'}"
    return f"{line} ({'; '.join(why_not)})" if why_not else line


def is_attn_qat_train_available() -> bool:
    """The active device has kernels for ATTN_QAT_TRAIN, forward and backward."""
    return all(inference.resolve(active_device(), part)[1] for part in ("forward", "backward"))


@cache
def _log_once(line: str) -> None:
    _logger.info(line)


# --- options ------------------------------------------------------------------------------------------------

# What `register` was given: the recipe that ATTN_QAT_TRAIN trains with and ATTN_QAT_INFER therefore computes.
_registered_recipe = Recipe.FP4
_PV_MODE_VARIABLE = "FASTVIDEO_FA4_PV_MODE"


def validate_fa4_pv_mode(mode: str) -> str:
    """`mode` if 'fp4' or 'bf16'. NotImplementedError for FastVideo's 'fp8', ValueError for anything else."""
    try:
        recipe_of(mode)
    except (ValueError, NotImplementedError) as error:
        raise type(error)(f"fa4_{error}") from None
    return mode


def _pv_mode(arguments: dict) -> str:
    """The layer's fa4_pv_mode, else its recipe's, else FastVideo's variable, else the registered recipe's."""
    mode, recipe = arguments.pop("fa4_pv_mode", None), arguments.pop("recipe", None)
    if mode is None and recipe is None:
        mode, recipe = os.environ.get(_PV_MODE_VARIABLE), _registered_recipe
    return validate_fa4_pv_mode(mode) if mode is not None else _mode_for("attn_qat_infer", recipe)


def _recipe(name: str, recipe: str | Recipe) -> Recipe:
    if recipe not in tuple(Recipe):
        raise ValueError(f"{name}: recipe is {recipe!r}, takes 'cudnn', 'fp4' or 'fp4_qk'")
    return Recipe(recipe)


def _mode_for(name: str, recipe: str | Recipe) -> str:
    """The fa4_pv_mode that `recipe` trains for."""
    recipe = _recipe(name, recipe)
    for mode, trained in PV_MODES.items():
        if trained == recipe:
            return mode
    raise ValueError(
        f"{name}: recipe is '{recipe}', which no inference computes; takes 'fp4' or 'fp4_qk', "
        "or an fa4_pv_mode"
    )


def _check_options(
    name: str, num_heads: int, head_size: int, num_kv_heads: int | None, arguments: dict
) -> None:
    """Refuses what the kernels do not compute; what another backend takes may be None, False or 0."""
    if head_size not in HEAD_SIZES:
        raise ValueError(f"{name}: head_size is {head_size}, takes 64 or 128")
    if num_kv_heads is not None and (num_kv_heads < 1 or num_heads % num_kv_heads):
        raise ValueError(
            f"{name}: num_kv_heads is {num_kv_heads}, takes a divisor of num_heads, which is {num_heads}"
        )
    for argument in ("dropout_p", "dropout_rate"):
        if arguments.get(argument):
            raise NotImplementedError(
                f"{name}: {argument} is {arguments[argument]}, takes 0: the backward rebuilds P from "
                "the row sums and would have to redraw the same mask, which no kernel here does"
            )
    for argument, value in arguments.items():
        if isinstance(value, Tensor) or value:
            raise TypeError(f"{name}: got {argument}={value!r}, which this backend would ignore")


class _Impl(AttentionImpl):
    """What both implementations share: options, and BLHD around a function of BHSD tensors."""

    name: str

    def __init__(self, num_heads, head_size, causal, softmax_scale, num_kv_heads, arguments: dict):
        _check_options(self.name, num_heads, head_size, num_kv_heads, arguments)
        self.causal = causal
        self.softmax_scale = softmax_scale

    def preprocess_qkv(self, qkv: Tensor, attn_metadata) -> Tensor:
        """qkv unchanged."""
        return qkv

    def postprocess_output(self, output: Tensor, attn_metadata) -> Tensor:
        """output unchanged."""
        return output

    def _attend(
        self, function, query: Tensor, key: Tensor, value: Tensor, attn_metadata, **options
    ) -> Tensor:
        if getattr(attn_metadata, "attn_mask", None) is not None:
            raise NotImplementedError(f"{self.name}: attn_metadata carries an attn_mask, takes none")
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = function(q, k, v, is_causal=self.causal, softmax_scale=self.softmax_scale, **options)
        return out.transpose(1, 2).contiguous()


class AttnQatTrainImpl(_Impl):
    """Attention with fake-quantised operands and its backward (`attn_qat.attention`).

    extra_impl_args: `recipe` ('fp4', 'fp4_qk' or 'cudnn'; the one registered unless given). dropout_p must be
    0. Constructing it needs no kernel for the device; `forward` raises NotImplementedError where there is
    none.
    """

    name = "attn_qat_train"

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        causal: bool,
        softmax_scale: float,
        num_kv_heads: int | None = None,
        prefix: str = "",
        **extra_impl_args,
    ) -> None:
        self.recipe = _recipe(self.name, extra_impl_args.pop("recipe", None) or _registered_recipe)
        super().__init__(num_heads, head_size, causal, softmax_scale, num_kv_heads, extra_impl_args)
        _log_once(f"ATTN_QAT_TRAIN resolved: {attn_qat_train_receipt(self.recipe)}")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_metadata) -> Tensor:
        """(B, Lq, H, D) query, (B, Lkv, Hkv, D) key and value to contiguous (B, Lq, H, D), differentiable."""
        return self._attend(attention, query, key, value, attn_metadata, recipe=self.recipe)


class AttnQatInferImpl(_Impl):
    """Attention as FP4 tensor cores compute it (`attn_qat.infer`).

    extra_impl_args: `fa4_pv_mode`, 'fp4' or 'bf16', validated here, or `recipe` that stands for it; with
    neither it comes from FASTVIDEO_FA4_PV_MODE, else from the registered recipe. dropout_p must be 0.
    Constructing it needs no kernel for the device; `forward` raises NotImplementedError where there is none.
    """

    name = "attn_qat_infer"

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        causal: bool,
        softmax_scale: float,
        num_kv_heads: int | None = None,
        prefix: str = "",
        **extra_impl_args,
    ) -> None:
        self.fa4_pv_mode = _pv_mode(extra_impl_args)
        super().__init__(num_heads, head_size, causal, softmax_scale, num_kv_heads, extra_impl_args)
        _log_once(f"ATTN_QAT_INFER resolved: {attn_qat_infer_receipt(self.fa4_pv_mode)}")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_metadata) -> Tensor:
        """(B, Lq, H, D) query, (B, Lkv, Hkv, D) key and value to contiguous (B, Lq, H, D), no gradient."""
        return self._attend(infer, query, key, value, attn_metadata, pv_mode=self.fa4_pv_mode)


class _Backend(AttentionBackend):
    accept_output_buffer: bool = True

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return list(HEAD_SIZES)

    @staticmethod
    def get_metadata_cls() -> type:
        """The backend needs no metadata: FastVideo takes NotImplementedError for that."""
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> type:
        """The backend needs no metadata: FastVideo takes NotImplementedError for that."""
        raise NotImplementedError


class AttnQatTrainBackend(_Backend):
    """FastVideo's ATTN_QAT_TRAIN."""

    @staticmethod
    def get_name() -> str:
        return "ATTN_QAT_TRAIN"

    @staticmethod
    def get_impl_cls() -> type[AttnQatTrainImpl]:
        return AttnQatTrainImpl


class AttnQatInferBackend(_Backend):
    """FastVideo's ATTN_QAT_INFER."""

    @staticmethod
    def get_name() -> str:
        return "ATTN_QAT_INFER"

    @staticmethod
    def get_impl_cls() -> type[AttnQatInferImpl]:
        return AttnQatInferImpl


# --- selection ----------------------------------------------------------------------------------------------

_AVAILABLE = {  # backend -> (is there a kernel, the receipt that says why not)
    AttnQatTrainBackend: (is_attn_qat_train_available, attn_qat_train_receipt),
    AttnQatInferBackend: (is_attn_qat_infer_available, attn_qat_infer_receipt),
}


def select(backend: type, head_size: int) -> str:
    """Dotted path of `backend`, for FastVideo to resolve, if the active device can run it at this head size.

    Raises NotImplementedError otherwise: another backend in its place would train or measure something else.
    """
    name = backend.get_name()
    if head_size not in HEAD_SIZES:
        raise NotImplementedError(f"{name}: head_size is {head_size}, takes 64 or 128")
    available, receipt = _AVAILABLE[backend]
    if not available():
        raise NotImplementedError(f"{name}: no kernel for the active device ({receipt()})")
    return f"{backend.__module__}.{backend.__qualname__}"


_MARK = "_attn_qat_replaces"


def register(recipe: str | Recipe = Recipe.FP4) -> None:
    """Makes FastVideo's ATTN_QAT_TRAIN and ATTN_QAT_INFER the backends of this module.

    Call it before models are built.

    recipe: what ATTN_QAT_TRAIN trains and ATTN_QAT_INFER computes, unless a layer says otherwise. Every other
    backend is left to FastVideo. Nothing of FastVideo is modified: its current platform object is replaced by
    one of a subclass, the place where FastVideo asks for a backend; `unregister` puts the first one back. A
    second call only sets the recipe.
    Raises ImportError without FastVideo.
    """
    global _registered_recipe
    recipe = _recipe("register", recipe)
    platforms, selector = _fastvideo()
    _registered_recipe = recipe
    current = platforms.current_platform
    if not hasattr(current, _MARK):
        platforms._current_platform = _platform_class(type(current), platforms.AttentionBackendEnum)()
        setattr(platforms._current_platform, _MARK, current)
        selector._cached_get_attn_backend.cache_clear()


def unregister() -> None:
    """Gives FastVideo its own platform object back. Layers that exist keep their implementation."""
    global _registered_recipe
    _registered_recipe = Recipe.FP4
    platforms, selector = _fastvideo()
    if hasattr(platforms.current_platform, _MARK):
        platforms._current_platform = getattr(platforms.current_platform, _MARK)
        selector._cached_get_attn_backend.cache_clear()


def _fastvideo():
    """FastVideo's `platforms` and `attention.selector`, with the private names that `register` needs."""
    try:
        from fastvideo import platforms
        from fastvideo.attention import selector
    except ModuleNotFoundError as error:
        if error.name != "fastvideo":
            raise
        raise missing("fastvideo", "fastvideo>=0.2,<0.3") from error

    for module, attribute in ((platforms, "_current_platform"), (selector, "_cached_get_attn_backend")):
        if not hasattr(module, attribute):
            raise ImportError(
                f"attn_qat.integrations.fastvideo: this FastVideo has no {module.__name__}.{attribute}; "
                "written for fastvideo 0.2"
            )
    return platforms, selector


def _platform_class(base: type, names) -> type:
    """A platform like `base` whose ATTN_QAT_TRAIN and ATTN_QAT_INFER are the backends of this module."""
    ours = {names.ATTN_QAT_TRAIN: AttnQatTrainBackend, names.ATTN_QAT_INFER: AttnQatInferBackend}

    class AttnQatPlatform(base):
        @classmethod
        def get_attn_backend_cls(cls, selected_backend, head_size: int, dtype: torch.dtype) -> str:
            if selected_backend in ours:
                return select(ours[selected_backend], head_size)
            return super().get_attn_backend_cls(selected_backend, head_size, dtype)

    return AttnQatPlatform


@contextmanager
def inference_layers(model: torch.nn.Module, fa4_pv_mode: str | None = None):
    """Within it the ATTN_QAT_TRAIN layers of `model` run ATTN_QAT_INFER: to validate what is deployed.

    fa4_pv_mode: by default the one that each layer's recipe trains for. Raises ValueError if there is no such
    layer, if a recipe has no inference ('cudnn') or on a wrong mode; yields the number of layers.
    """
    layers = [m for m in model.modules() if isinstance(getattr(m, "attn_impl", None), AttnQatTrainImpl)]
    if not layers:
        raise ValueError(
            "inference_layers: model has no layer whose attn_impl is an AttnQatTrainImpl of attn_qat"
        )
    before = [layer.attn_impl for layer in layers]
    after = [_inference_of(layer, fa4_pv_mode) for layer in layers]
    try:
        for layer, impl in zip(layers, after, strict=True):
            layer.attn_impl = impl
        yield len(layers)
    finally:
        for layer, impl in zip(layers, before, strict=True):
            layer.attn_impl = impl


def _inference_of(layer: torch.nn.Module, fa4_pv_mode: str | None) -> AttnQatInferImpl:
    trained = layer.attn_impl
    return AttnQatInferImpl(
        layer.num_heads,
        layer.head_size,
        trained.causal,
        trained.softmax_scale,
        layer.num_kv_heads,
        fa4_pv_mode=fa4_pv_mode,
        recipe=trained.recipe,
    )
