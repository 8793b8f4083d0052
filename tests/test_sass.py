"""The machine code in the library: which kernels for which targets, the instructions they must use, no spills."""

import os
import re
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

import pytest

import attn_qat

LIBRARY = Path(attn_qat.__file__).with_name("libattn_qat.so")
INFO = attn_qat.build_info()
pytestmark = pytest.mark.skipif(not INFO["cuda"], reason="the library was built without CUDA")


@cache
def cuda_tool(name):
    """cuobjdump, or a reason to fail: a CUDA build without it is not checked."""
    wheels = Path(sysconfig.get_paths()["platlib"], "nvidia", "cu13", "bin")
    path = shutil.which(name, path=os.pathsep.join([str(wheels), os.environ["PATH"]]))
    assert path, f"no {name}: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
    return path


def cuobjdump(*options):
    tool = cuda_tool("cuobjdump")
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(tool).parent), os.environ["PATH"]])}
    done = subprocess.run(
        [tool, *options, str(LIBRARY)], capture_output=True, text=True, env=environment, check=True
    )
    return done.stdout


@cache
def machine_code(target):
    """Kernel (mangled name) -> its instructions."""
    functions = re.split(r"^\s*Function : ", cuobjdump("-sass", "-arch", target), flags=re.M)[1:]
    return {name: body for name, _, body in (function.partition("\n") for function in functions)}


def test_holds_machine_code_for_the_named_targets_and_no_ptx():
    found = re.findall(r"\.(sm_\w+)\.cubin", cuobjdump("-lelf"))
    assert set(found) == set(INFO["targets"])
    assert ".ptx" not in cuobjdump("-lptx")


def kernels_of(source, target):
    """Kernels of csrc/cuda/<source>.cu: in namespace <folder> and an anonymous one, named after the file."""
    folder, stem = source.split("/")
    return [name for name in machine_code(target) if re.search(rf"\d{folder}\d+_GLOBAL__.*_{stem}_cu_", name)]


@pytest.mark.parametrize("source", INFO["kernels"])
def test_the_kernels_of_a_file_are_there_for_each_of_its_targets(source):
    counts = {target: len(kernels_of(source, target)) for target in INFO["targets"]}
    assert counts == {target: max(counts.values()) * (target in INFO["kernels"][source]) for target in counts}


@pytest.mark.parametrize("folder", sorted({source.split("/")[0] for source in INFO["kernels"]}))
def test_each_kernel_family_has_kernels(folder):  # a file of it may hold launch code only
    sources = [source for source in INFO["kernels"] if source.startswith(folder)]
    assert any(kernels_of(source, INFO["kernels"][source][0]) for source in sources)


QUANTISERS = {"common/quantize": "fake_quantize", "common/pack": "quantize", "common/unpack": "dequantize"}


@pytest.mark.parametrize("target", INFO["targets"])
@pytest.mark.parametrize("source", QUANTISERS)
def test_quantisers_have_wide_and_scalar_kernels_for_each_dtype_and_axis(source, target):
    """Along columns both for flat tensors and for rows with strides."""
    names = " ".join(kernels_of(source, target))
    found = re.findall(rf"\d{QUANTISERS[source]}_along_(rows|cols)I(?:\d+__)?(\w+?)Li", names)
    axes = 2 * ["rows"] + 4 * ["cols"]
    assert sorted(found) == sorted((axis, dtype) for axis in axes for dtype in ("f", "half", "nv_bfloat16"))


@pytest.mark.parametrize("target", INFO["targets"])
@pytest.mark.parametrize("source", QUANTISERS)
def test_quantises_by_hardware_where_there_is_one(source, target):
    wanted = target != "sm_90a"
    for name in kernels_of(source, target):
        assert bool(re.search(r"\bF2FP\S*\.E2M1\.", machine_code(target)[name])) == wanted, name


@pytest.mark.parametrize("target", INFO["targets"])
@pytest.mark.parametrize("source", QUANTISERS)
def test_values_move_sixteen_bytes_at_once(source, target):
    """In the wide kernels: Li4 and Li8 are the words that a lane holds."""
    access = r"\bSTG\.E\.128" if source == "common/unpack" else r"\bLDG\.E\.128"
    for name in kernels_of(source, target):
        wide = bool(re.search("Li[48]E", name))
        assert bool(re.search(access, machine_code(target)[name])) == wide, name


@cache
def resources(target):
    """Kernel (mangled name) -> {"REG": ..., "STACK": ..., "SHARED": ..., "LOCAL": ...}."""
    found = re.findall(r"Function (\S+):\s+(REG:.*)", cuobjdump("--dump-resource-usage", "-arch", target))
    return {
        name: {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", usage)} for name, usage in found
    }


@pytest.mark.parametrize("target", INFO["targets"])
def test_no_kernel_spills_or_exceeds_its_registers(target):
    usage = resources(target)
    assert set(usage) == set(machine_code(target))
    for name, used in usage.items():
        assert used["REG"] <= 255 and used["STACK"] == 0 and used["LOCAL"] == 0, (name, used)
        assert not re.search(r"\b(LDL|STL)\b", machine_code(target)[name]), name
        assert used["SHARED"] <= 48 << 10, (name, used)  # static; the dynamic part is checked when compiled


MATMUL_SOURCES = [s for s in INFO["kernels"] if re.fullmatch(r"mma_sync/(forward|backward_\w+)", s)]


@pytest.mark.parametrize("target", INFO["targets"])
@pytest.mark.parametrize("source", MATMUL_SOURCES)
def test_matmul_kernels_use_tensor_cores_and_asynchronous_copies(source, target):
    names = kernels_of(source, target)
    assert names
    for name in names:
        code = machine_code(target)[name]
        assert len(re.findall(r"\bHMMA\.16816\.F32", code)) >= 32, name
        assert re.search(r"\bLDSM\b", code) and re.search(r"\bLDGSTS\b", code), name


@pytest.mark.parametrize("target", INFO["targets"])
@pytest.mark.parametrize("source", ["mma_sync/forward", "mma_sync/backward_dkdv"])
def test_probabilities_are_quantised_by_hardware_where_there_is_one(source, target):
    for name in kernels_of(source, target):
        wanted = target != "sm_90a" and not re.search(r"6RecipeE2E", name)
        assert bool(re.search(r"\bF2FP\S*\.E2M1\.", machine_code(target)[name])) == wanted, name


HOPPER_SOURCES = ["sm90/forward", "sm90/backward"]


@pytest.mark.parametrize("source", HOPPER_SOURCES)
def test_hopper_kernels_use_warpgroup_products_and_tensor_maps(source):
    """wgmma (HGMMA), boxes (UTMALDG), registers that change hands (USETMAXREG), and none of the older instructions."""
    names = kernels_of(source, "sm_90a")
    assert names
    for name in names:
        code = machine_code("sm_90a")[name]
        assert re.search(r"\bHGMMA\.64x(64|128)x16\.F32", code) and re.search(r"\bUTMALDG\.[45]D", code), name
        assert len(re.findall(r"\bUSETMAXREG", code)) == 2, name
        assert not re.search(r"\b(HMMA|LDSM|LDGSTS)\b", code), name


@pytest.mark.parametrize("source", HOPPER_SOURCES)
def test_hopper_products_are_not_serialised(source):
    """A product that others follow does not end its group (gsb0): only one or two in a group of four to sixteen do."""
    for name in kernels_of(source, "sm_90a"):
        products = re.findall(r"\bHGMMA\.[^;]*;", machine_code("sm_90a")[name])
        assert sum("gsb0" in product for product in products) <= len(products) / 3, name


def test_hopper_backward_adds_by_bulk_copies():
    for name in kernels_of("sm90/backward", "sm_90a"):
        assert re.search(r"\bUBLKRED", machine_code("sm_90a")[name]), name
