"""Collects the GoogleTest programs: every test of tests/cpp/test_*.cpp is one pytest item.

CMake builds the programs when the first of their sources is collected; a failed build is a collection error.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from pytest_cpp.google import GoogleTestFacade
from pytest_cpp.plugin import CppItem

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "cpp"


def gtest_sources():
    """Folder of GoogleTest's sources from PyPI, for machines whose system has no GoogleTest."""
    try:
        files = importlib.metadata.files("ros-gtest-vendor")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return next(Path(file.locate()).resolve().parents[1] for file in files if file.name == "gtest-all.cc")


@cache
def build_programs():
    """Builds all programs; returns what went wrong, or None."""
    scripts = str(Path(sys.executable).parent)  # cmake and ninja may come from PyPI
    path = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    cmake = shutil.which("cmake", path=path)
    if cmake is None:
        return "no cmake: pip install cmake ninja"
    configure = [cmake, "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja",
                 f"-DATTN_QAT_GTEST_SOURCE={gtest_sources()}"]
    for command in (configure, [cmake, "--build", str(BUILD)]):
        done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True)
        if done.returncode:
            return f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return None


class GoogleTest(CppItem):
    @property
    def fspath(self):  # the program that pytest-cpp runs for this item
        return BUILD / self.path.stem


class GoogleTestSource(pytest.File):
    """A source file whose tests are those of the program that CMake makes of it."""

    def collect(self):
        problem = build_programs()
        if problem:
            raise self.CollectError(f"the C++ tests cannot be built: {problem}")
        facade = GoogleTestFacade()
        for name in facade.list_tests(str(BUILD / self.path.stem), harness_collect=()):
            yield GoogleTest.from_parent(parent=self, name=name, facade=facade, arguments=())


def pytest_collect_file(file_path, parent):
    return GoogleTestSource.from_parent(parent, path=file_path) if file_path.match("test_*.cpp") else None
