"""Builds attn-qat through one ninja file: the operator library and, where Python.h is present, `_C`.

    libattn_qat.so   csrc/cpu, csrc/torch and the CUDA objects: every operator. It knows no Python and loads
                     under any torch from TORCH_TARGET on.
    _C               csrc/python_module.cpp, linked to the library: build information and helpers for tests

Environment: ATTN_QAT_CUDA=on|off|auto (auto: CUDA kernels where nvcc is found), CUDA_HOME, CXX, MAX_JOBS.
ATTN_QAT_INJECT_DELAYS=0|1: 1 makes kernels that pause at their barriers, to look for races (docs/hopper.md), not to use.
"""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:
    raise SystemExit(f"attn-qat: setuptools is {setuptools.__version__}, the build needs 77 or newer: "
                     "pip install 'setuptools>=77' ninja pybind11") from None

from _backend import TORCH_REQUIREMENT, TORCH_TARGET, find_torch, torch_version

# Folder of csrc/cuda -> targets its kernels are compiled for. No PTX: an `a` target moves to no other device.
ALL = ["sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a"]
KERNEL_ARCH = {"common": ALL, "mma_sync": ALL, "sm90": ["sm_90a"]}
OLDEST_NVCC = (12, 9)  # the first that knows every target

# csrc/cpu/*_<name>.cpp -> instruction set. All but "plain" exist on x86-64 only.
ISA_FLAGS = {
    "avx512": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512".split(),
    "avx2": "-mavx2 -mfma -mf16c".split(),
    "plain": [],
}
X86 = platform.machine() in ("x86_64", "AMD64")

ROOT = Path(__file__).resolve().parent
CSRC = Path("csrc")  # relative to ROOT, where ninja runs: short messages and a tree that can be moved
BUILD = Path("build", "native")
GENERATED = BUILD / "generated"
LIBRARY = "libattn_qat.so"
EXPORTS = GENERATED / "exports.map"
MODULE = "_C" + sysconfig.get_config_var("EXT_SUFFIX")

CXX_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra",
             f"-I{CSRC}", f"-I{GENERATED}"]
# FMA only where the source says so: fused at the compiler's whim, instruction sets would differ in results.
CPU_FLAGS = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", f"-DATTN_QAT_X86={int(X86)}"]
NVCC_FLAGS = ["-std=c++17", "-O3", "-Xptxas=-warn-spills", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall", f"-I{CSRC}"]
# In the compiler's output: C7519 alone is harmless (a fence that it inserts itself).
SPILLED, SERIALISED = "spill", "C751[0-8]|C7520"


def say(text):
    print(f"attn-qat: {text}", flush=True)


def fail(text):
    raise SystemExit(f"attn-qat: {text}")


def run(command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


# ---- tools ----


@dataclass
class Cuda:
    nvcc: str
    version: str
    include: Path
    lib: Path


def inspect_nvcc(nvcc):
    """A Cuda, or a sentence that says why this nvcc cannot serve."""
    release = re.search(r"release (\d+)\.(\d+)", run([nvcc, "--version"]).stdout)
    # nvcc may be a wrapper script: only nvcc itself knows where its toolkit lies.
    dryrun = run([nvcc, "--dryrun", "-x", "cu", "-E", os.devnull])
    top = re.search(r"^#\$ TOP=(.*)$", dryrun.stderr + dryrun.stdout, re.M)
    if not release or not top:
        return f"{nvcc} does not run"
    version = tuple(map(int, release.groups()))
    if version < OLDEST_NVCC:
        return "%s is CUDA %d.%d, the targets need %d.%d" % (nvcc, *version, *OLDEST_NVCC)
    home = Path(top.group(1)).resolve()
    lib = next((home / d for d in ("lib64", "lib", "targets/x86_64-linux/lib")
                if (home / d / "libcudart_static.a").is_file()), None)
    include = next((home / d for d in ("include", "targets/x86_64-linux/include")
                    if (home / d / "cuda_runtime_api.h").is_file()), None)
    if lib is None or include is None:
        return f"{home} has no CUDA runtime (libcudart_static.a, cuda_runtime_api.h)"
    return Cuda(nvcc, "%d.%d" % version, include, lib)


def find_cuda():
    mode = os.environ.get("ATTN_QAT_CUDA") or "auto"
    if mode not in ("on", "off", "auto"):
        fail(f"ATTN_QAT_CUDA is {mode!r}, takes on, off or auto")
    if mode == "off":
        say("ATTN_QAT_CUDA=off: CPU kernels only")
        return None
    home = os.environ.get("CUDA_HOME")
    places = [Path(home, "bin", "nvcc")] if home else []
    places += [shutil.which("nvcc"), Path(sysconfig.get_paths()["platlib"], "nvidia", "cu13", "bin", "nvcc"),
               "/usr/local/cuda/bin/nvcc"]
    nvcc = next((str(p) for p in places if p and os.access(p, os.X_OK)), None)
    found = inspect_nvcc(nvcc) if nvcc else "no nvcc (set CUDA_HOME, or `make cuda-tools`)"
    if isinstance(found, Cuda):
        say(f"CUDA {found.version} ({nvcc})")
        return found
    if mode == "on":
        fail(f"ATTN_QAT_CUDA=on, but {found}")
    say(f"CPU kernels only: {found}")
    return None


def race_hunt():
    """Flags of nvcc, and what its output may not hold, of this build: usual, or with pauses, which take registers."""
    wanted = os.environ.get("ATTN_QAT_INJECT_DELAYS") or "0"
    if wanted not in ("0", "1"):
        fail(f"ATTN_QAT_INJECT_DELAYS is {wanted!r}, takes 0 or 1")
    if wanted == "0":
        return [], f"{SPILLED}|{SERIALISED}"
    say("ATTN_QAT_INJECT_DELAYS=1: kernels that pause at their barriers, not for use")
    return ["-DATTN_QAT_INJECT_DELAYS"], SERIALISED


def find_cxx():
    cxx = shlex.split(os.environ.get("CXX") or "g++")
    if not shutil.which(cxx[0]):
        fail(f"no C++ compiler {cxx[0]!r}: install g++, or set CXX")
    return cxx


def find_ninja():
    try:
        import ninja
        return str(Path(ninja.BIN_DIR, "ninja"))
    except ImportError:
        return shutil.which("ninja") or fail("no ninja: pip install ninja")


def python_includes():
    """Include folders of Python and pybind11, or None: the module is optional."""
    python = Path(sysconfig.get_paths()["include"])
    if not (python / "Python.h").is_file():
        return say(f"no {python}/Python.h: built without attn_qat._C")
    try:
        import pybind11
    except ImportError:
        return say("no pybind11: built without attn_qat._C")
    return [f"-isystem{python}", f"-isystem{pybind11.get_include()}"]


def parallel_jobs(meminfo=Path("/proc/meminfo")):
    """MAX_JOBS, or one for each core and 4 GB of free memory, which an nvcc or a large C++ file can take."""
    if os.environ.get("MAX_JOBS"):
        return max(1, int(os.environ["MAX_JOBS"]))
    free = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
    memory = int(free.group(1)) // (4 << 20) if free else 1
    return max(1, min(len(os.sched_getaffinity(0)), memory))


# ---- what is built ----


def kernel_files():
    """csrc/cuda/<folder>/<file>.cu -> targets."""
    files = sorted(p.relative_to(ROOT) for p in (ROOT / CSRC / "cuda").glob("*/*.cu"))
    unknown = sorted({file.parent.name for file in files} - set(KERNEL_ARCH))
    if unknown:
        fail(f"KERNEL_ARCH in setup.py has no targets for csrc/cuda/{unknown[0]}")
    return {file: KERNEL_ARCH[file.parent.name] for file in files}


def cpu_files():
    """csrc/cpu/<file>.cpp -> flags beyond CPU_FLAGS."""
    files = {}
    for file in sorted(p.relative_to(ROOT) for p in (ROOT / CSRC / "cpu").glob("*.cpp")):
        isa = file.stem.rpartition("_")[2]
        if X86 or isa == "plain" or isa not in ISA_FLAGS:
            files[file] = ISA_FLAGS.get(isa, [])
    return files


def build_info(version, cuda, cxx):
    """What the library says about itself: attn_qat.build_info()."""
    kernels = kernel_files() if cuda else {}
    return {
        "version": version,
        "commit": run(["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]).stdout.strip()
        if (ROOT / ".git").exists() else "",
        "compiler": run([*cxx, "--version"]).stdout.partition("\n")[0],
        "torch_target": "%d.%d" % TORCH_TARGET,
        "torch_headers": torch_version(find_torch()),
        "cpu": [isa for isa in ISA_FLAGS if X86 or isa == "plain"],
        "cuda": cuda.version if cuda else None,
        "targets": [arch for arch in ALL if any(arch in archs for archs in kernels.values())],
        "kernels": {f"{f.parent.name}/{f.stem}": archs for f, archs in kernels.items()},
    }


def write_if_changed(path, text):
    path = ROOT / path
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)


def write_generated(info):
    # Apart from the commit, which changes often: only build_info.cpp is compiled again for it.
    write_if_changed(GENERATED / "build_info.h", f"""// Generated by setup.py.
#pragma once
#define ATTN_QAT_VERSION "{info["version"]}"
#define ATTN_QAT_CUDA_TARGETS "{" ".join(info["targets"])}"  // empty: built without CUDA

// JSON object: version, commit, compiler, torch_target, torch_headers, cpu, cuda, targets, kernels.
extern "C" __attribute__((visibility("default"))) const char* attn_qat_build_info();
""")
    write_if_changed(GENERATED / "build_info.cpp", f"""// Generated by setup.py.
#include "build_info.h"

const char* attn_qat_build_info() {{
  return R"json({json.dumps(info, indent=1)})json";
}}
""")
    # Without it the templates of the C++ library are exported too, as this file's flags compiled them.
    write_if_changed(EXPORTS, "{ global: attn_qat_build_info; local: *; };\n")


class NinjaFile:
    """Collects rules and edges; paths hold no blanks or colons because they are relative to ROOT."""

    def __init__(self):
        self.text = ["# Generated by setup.py.", "ninja_required_version = 1.5", f"builddir = {BUILD}"]

    @staticmethod
    def words(words):
        return " ".join(shlex.quote(str(word)) for word in words).replace("$", "$$")

    def rule(self, name, command, depfile):
        self.text += ["", f"rule {name}", f"  command = {command}", f"  description = {name} $out"]
        self.text += ["  depfile = $out.d", "  deps = gcc"] * depfile

    def edge(self, output, rule, inputs, flags, implicit=()):
        after = " | " + " ".join(map(str, implicit)) if implicit else ""
        self.text += ["", f"build {output}: {rule} {' '.join(map(str, inputs))}{after}",
                      f"  flags = {self.words(flags)}"]
        return output


def write_ninja(cxx, cuda, torch, python):
    """Writes build.ninja; returns the files to install, relative to ROOT."""
    ninja = NinjaFile()
    compiler = ninja.words(cxx)
    pauses, slow_code = race_hunt()
    ninja.rule("cxx", f"{compiler} -MMD -MF $out.d $flags -c $in -o $out", depfile=True)
    ninja.rule("link", f"{compiler} -shared -o $out $in $flags", depfile=False)
    if cuda:
        # What costs speed without costing correctness fails the build: registers spilled, wgmma serialised.
        nvcc = f"{ninja.words([cuda.nvcc])} -MMD -MF $out.d $flags -c $in -o $out"
        ninja.rule("nvcc", f"{{ {nvcc}; }} > $out.log 2>&1 && ! grep -E '{slow_code}' $out.log && cat $out.log || "
                           "{ cat $out.log; rm -f $out; false; }", depfile=True)

    def compile_file(file, rule, flags, folder=BUILD):
        return ninja.edge((folder / file).with_suffix(".o"), rule, [file], flags)

    torch_flags = ["-DTORCH_TARGET_VERSION=((%dULL<<56)|(%dULL<<48))" % TORCH_TARGET,
                   f"-isystem{torch}/include", f"-DATTN_QAT_CUDA={int(bool(cuda))}"]
    link = [f"-Wl,-soname,{LIBRARY}", f"-Wl,--version-script={EXPORTS}", "-Wl,--exclude-libs,ALL",
            "-Wl,-z,defs", f"-L{torch}/lib",
            # libtorch.so reaches libtorch_cuda.so, which holds the stream getter; nothing else refers to it.
            "-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed", "-ltorch_cpu", "-lc10"]
    objects = [compile_file(GENERATED / "build_info.cpp", "cxx", CXX_FLAGS, folder=Path())]
    objects += [compile_file(f, "cxx", CXX_FLAGS + CPU_FLAGS + extra) for f, extra in cpu_files().items()]
    if cuda:
        torch_flags.append(f"-isystem{cuda.include}")
        link += [f"-L{cuda.lib}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        host = ["-ccbin", cxx[0]] if os.environ.get("CXX") and len(cxx) == 1 else []
        for file, targets in kernel_files().items():
            gencode = [f"-gencode=arch={t.replace('sm', 'compute')},code={t}" for t in targets]
            objects.append(compile_file(file, "nvcc", NVCC_FLAGS + pauses + host + gencode))
    for file in sorted(p.relative_to(ROOT) for p in (ROOT / CSRC / "torch").glob("*.cpp")):
        objects.append(compile_file(file, "cxx", CXX_FLAGS + torch_flags))
    products = [ninja.edge(BUILD / LIBRARY, "link", objects, link)]

    if python:
        folder = BUILD / sysconfig.get_config_var("SOABI")
        module = compile_file(CSRC / "python_module.cpp", "cxx", CXX_FLAGS + python, folder)
        flags = [f"-L{BUILD}", f"-l{LIBRARY[3:-3]}", "-Wl,-rpath,$ORIGIN", "-Wl,--allow-shlib-undefined"]
        products.append(ninja.edge(folder / MODULE, "link", [module], flags, implicit=[BUILD / LIBRARY]))
    write_if_changed(BUILD / "build.ninja", "\n".join(ninja.text) + "\n")
    return products


def build(version):
    if sys.platform != "linux":
        fail(f"this is {sys.platform}: attn-qat builds and runs on Linux only")
    if not X86:
        say(f"this is {platform.machine()}: plain C++ CPU kernels; only x86_64 is tested")
    torch = find_torch()
    if torch is None:
        fail(f"{sys.executable} has no torch to build against: pip install '{TORCH_REQUIREMENT}', then "
             "pip install --no-build-isolation attn-qat (or from a clone: make build)")
    cxx, cuda, python = find_cxx(), find_cuda(), python_includes()
    write_generated(build_info(version, cuda, cxx))
    products = write_ninja(cxx, cuda, torch, python)
    command = [find_ninja(), "-f", str(BUILD / "build.ninja"), "-j", str(parallel_jobs())]
    if subprocess.run(command, cwd=ROOT).returncode:
        fail("the build failed; the messages are above")
    return products


# ---- setuptools ----


class BuildExt(build_ext):
    products = ()

    def run(self):
        self.products = build(self.distribution.get_version())
        for product in self.products:
            target = self.target(product)
            target.parent.mkdir(parents=True, exist_ok=True)
            # Renamed into place: a process that has the old library mapped keeps it.
            part = target.with_name(target.name + ".part")
            shutil.copy2(ROOT / product, part)
            os.replace(part, target)

    def target(self, product, inplace=None):
        inplace = self.inplace or self.editable_mode if inplace is None else inplace
        return (ROOT / "python" if inplace else Path(self.build_lib)) / "attn_qat" / product.name

    def get_outputs(self):
        return [str(self.target(product)) for product in self.products]

    def get_output_mapping(self):
        products = self.products if self.editable_mode else ()
        return {str(self.target(p, False)): str(self.target(p, True)) for p in products}

    def get_source_files(self):
        return []  # MANIFEST.in names them


class BdistWheel(bdist_wheel):
    def get_tag(self):
        # One wheel for every Python: the library has no Python in it, and `_C` is needed nowhere.
        return "py3", "none", super().get_tag()[2]


setup(ext_modules=[Extension("attn_qat._C", [])], cmdclass={"build_ext": BuildExt, "bdist_wheel": BdistWheel})
