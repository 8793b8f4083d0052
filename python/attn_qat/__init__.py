"""NVFP4 fake-quantised attention for PyTorch: train with it, and FP4 inference computes what training saw.

`attention` is the differentiable function, `Attention` its module; the operators are `torch.ops.attn_qat.*`.
`attn_qat.cudnn` is cuDNN frontend's backward API, imported when it is first named.
"""

import importlib

from . import distributed, reference
from ._library import build_info
from .autograd import attention
from .convert import Conversion, convert
from .inference import InferReceipt, infer, infer_kernel
from .module import Attention
from .ops import (
    backward,
    backward_dkdv,
    backward_dq,
    backward_out,
    backward_workspace_bytes,
    dequantize,
    explain,
    fake_quantize,
    forward,
    preprocess,
    quantize,
)
from .recipe import Recipe

__version__ = build_info()["version"]

distributed.register_with_dtensor()

__all__ = [
    "Attention",
    "Conversion",
    "InferReceipt",
    "Recipe",
    "attention",
    "backward",
    "backward_dkdv",
    "backward_dq",
    "backward_out",
    "backward_workspace_bytes",
    "build_info",
    "convert",
    "dequantize",
    "distributed",
    "explain",
    "fake_quantize",
    "forward",
    "infer",
    "infer_kernel",
    "preprocess",
    "quantize",
    "reference",
]


def __getattr__(name: str):
    if name == "cudnn":
        return importlib.import_module(".cudnn", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
