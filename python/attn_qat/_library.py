"""Loads the operator library, with the module `_C` where this interpreter has one.

`_C` is linked to the library, so importing it registers `torch.ops.attn_qat`; it adds helpers for tests. Without it the
library is loaded by itself and everything but those helpers works.
"""

import ctypes
import json
from pathlib import Path

import torch

LIBRARY = Path(__file__).with_name("libattn_qat.so")

try:
    from . import _C
except ImportError as error:
    if not LIBRARY.is_file():
        raise ImportError(
            f"attn_qat: {LIBRARY.name} is missing beside {Path(__file__).parent}; build it with `pip install .`"
        ) from error
    _C = None
    torch.ops.load_library(str(LIBRARY))


def build_info() -> dict:
    """What this build holds: version, commit, compiler, CUDA version, targets, and the targets of each kernel."""
    library = ctypes.CDLL(str(LIBRARY))
    library.attn_qat_build_info.restype = ctypes.c_char_p
    return json.loads(library.attn_qat_build_info())
