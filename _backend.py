"""In-tree build backend: setuptools, plus torch as a build requirement only where no torch is installed yet.

Naming torch under `requires` would make every isolated build download the newest torch, though the headers of
the installed one do: the library is built on torch's stable ABI, so which torch (2.10 or newer) provides them
is immaterial. They are found as files; torch is never imported here.
"""

import re
import site
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from setuptools.build_meta import *  # noqa: F401,F403
from setuptools.build_meta import get_requires_for_build_editable as _requires_editable
from setuptools.build_meta import get_requires_for_build_wheel as _requires_wheel

TORCH_TARGET = (2, 10)  # the oldest torch that the operator library loads under
TORCH_REQUIREMENT = "torch>=%d.%d" % TORCH_TARGET


def torch_version(folder):
    """'2.13.0+cpu' of the torch package in `folder`."""
    return re.search(r"__version__ = '(.*)'", Path(folder, "version.py").read_text()).group(1)


def _site_folders():
    """Where packages of this interpreter lie; right also inside pip's isolated build, which hides them."""
    yield sysconfig.get_paths()["platlib"]
    config = Path(sys.prefix, "pyvenv.cfg")
    shares_system = r"include-system-site-packages\s*=\s*true"
    if config.is_file() and not re.search(shares_system, config.read_text(), re.I):
        return
    yield from site.getsitepackages([sys.base_prefix])
    yield site.getusersitepackages()


def find_torch():
    """The folder of an installed torch that is new enough, or None."""
    folders = [Path(folder, "torch") for folder in _site_folders()]
    spec = find_spec("torch")
    if spec and spec.origin:
        folders.append(Path(spec.origin).parent)
    for folder in folders:
        if Path(folder, "version.py").is_file():
            major, minor = torch_version(folder).split(".")[:2]
            if (int(major), int(minor)) >= TORCH_TARGET:
                return folder
    return None


def _with_torch(requires):
    if find_torch() is not None:
        return requires
    print(f"attn-qat: {sys.executable} has no {TORCH_REQUIREMENT}, so this build downloads one.\n"
          f"To avoid that: pip install '{TORCH_REQUIREMENT}', then install attn-qat again.", file=sys.stderr)
    return [*requires, TORCH_REQUIREMENT]


def get_requires_for_build_wheel(config_settings=None):
    return _with_torch(_requires_wheel(config_settings))


def get_requires_for_build_editable(config_settings=None):
    return _with_torch(_requires_editable(config_settings))
