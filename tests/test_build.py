"""The built library: what it says it holds, what it really holds, and what it needs from the machine."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attn_qat

LIBRARY = Path(attn_qat.__file__).with_name("libattn_qat.so")
INFO = attn_qat.build_info()


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def run_python(code, *options):
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- what it says ----


def test_build_info_names_the_build():
    assert INFO["version"] == attn_qat.__version__ == importlib.metadata.version("attn-qat")
    assert INFO["torch_target"] == "2.10" and INFO["compiler"]
    assert "plain" in INFO["cpu"]


def test_build_info_counts_every_target_of_every_kernel():
    targets = {target for targets in INFO["kernels"].values() for target in targets}
    assert targets == set(INFO["targets"]) and bool(targets) == bool(INFO["cuda"])


def test_the_package_takes_torch_from_2_10_on():
    requirement = next(r for r in importlib.metadata.requires("attn-qat") if re.match(r"torch\b", r))
    assert requirement.replace(" ", "") == "torch>=2.10"


def test_the_module_repeats_the_library():
    module = pytest.importorskip("attn_qat._C", reason="no module for this interpreter", exc_type=ImportError)
    assert module.build_info() == INFO
    assert dict(module.kernels()) == INFO["kernels"]


def test_scalar_format_functions_agree_with_torch():
    module = pytest.importorskip("attn_qat._C", reason="no module for this interpreter", exc_type=ImportError)
    decoded = torch.tensor([module.e4m3_decode(byte) for byte in range(256)])
    want = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(decoded, want, rtol=0, atol=0, equal_nan=True)
    assert [module.e4m3_encode(value) for value in decoded[:127].tolist()] == list(range(127))
    assert module.e4m3_encode(1e9) == 0x7E
    assert [module.e2m1_decode(code) for code in range(8)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert [module.e2m1_encode(module.e2m1_decode(code)) for code in range(16)] == list(range(16))
    assert module.block_scale(6.0) == 1.0 and module.block_scale(0.0) == 2.0**-9
    assert module.fake_quantize(0.5859375, 0.46875) == 0.46875  # the quotient is exactly the midpoint 1.25


def test_importing_the_module_registers_the_operators():
    pytest.importorskip("attn_qat._C", reason="no module for this interpreter", exc_type=ImportError)
    assert run_python(
        "import sys, types, importlib.util, torch\n"
        f"package = types.ModuleType('attn_qat'); package.__path__ = [{str(LIBRARY.parent)!r}]\n"
        "sys.modules['attn_qat'] = package\n"  # not attn_qat/__init__.py, which would load the library too
        "import attn_qat._C\n"
        "print(torch.ops.attn_qat.fake_quantize(torch.full([16], 6.0)).sum().item())"
    ).strip() == "96.0"


def test_everything_but_the_helpers_works_without_the_module():
    assert run_python(
        "import sys; sys.modules['attn_qat._C'] = None\n"  # importing it raises ImportError
        "import torch, attn_qat\n"
        "x = torch.randn(1, 2, 32, 64, requires_grad=True)\n"
        "attn_qat.attention(x, x, x).sum().backward()\n"
        "print(attn_qat.build_info()['version'], bool(x.grad.isfinite().all()))"
    ).split() == [INFO["version"], "True"]


# ---- what it needs ----


def test_needs_no_cuda_python_or_openmp_library():
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-d", str(LIBRARY)))
    allowed = r"lib(torch|torch_cpu|c10)\.so|lib(stdc\+\+|m|gcc_s|c|dl|rt|pthread)\.so\.\d+|ld-linux.*"
    assert [name for name in needed if not re.fullmatch(allowed, name)] == []
    assert "libtorch.so" in needed  # the way to libtorch_cuda.so and its stream getter


def test_takes_only_the_stable_c_interface_of_torch():
    undefined = output("nm", "-D", "--undefined-only", str(LIBRARY)).split()
    assert [name for name in undefined if re.search(r"3c10|2at\d|5torch|Py[A-Z_]", name)] == []
    assert [name for name in undefined if name.startswith("aoti_torch_")]


def test_exports_nothing_but_build_info():
    assert output("nm", "-D", "--defined-only", str(LIBRARY)).split()[2:] == ["attn_qat_build_info"]


def test_needs_no_newer_c_library_than_this_one(record_property):
    versions = re.findall(r"\b(GLIBC|GLIBCXX)_([0-9.]+)", output("readelf", "-V", str(LIBRARY)))
    newest = {}
    for kind, version in versions:
        newest[kind] = max(newest.get(kind, ()), tuple(map(int, version.split("."))))
    for kind, version in newest.items():
        record_property(kind, ".".join(map(str, version)))
    here = tuple(map(int, os.confstr("CS_GNU_LIBC_VERSION").split()[1].split(".")))
    assert newest["GLIBC"] <= here
