"""setup.py: what it decides from the environment and what it tells a user who cannot build."""

import os
import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def setup(monkeypatch):
    """The names that setup.py defines."""
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: None)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.delenv("MAX_JOBS", raising=False)
    return runpy.run_path(str(ROOT / "setup.py"))


def fake_nvcc(folder, release):
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\necho 'release {release}, V{release}.1'\necho '#$ TOP={folder}'\n")
    nvcc.chmod(0o755)


def test_max_jobs_is_obeyed(setup, monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "3")
    assert setup["parallel_jobs"]() == 3


@pytest.mark.parametrize("free_gb, jobs", [(1, 1), (9, 2), (4096, None)])
def test_jobs_follow_cores_and_free_memory(setup, tmp_path, free_gb, jobs):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 1 kB\nMemAvailable:   {free_gb << 20} kB\n")
    cores = len(os.sched_getaffinity(0))
    assert setup["parallel_jobs"](meminfo) == min(jobs or cores, cores)


def test_cuda_off_says_so(setup, monkeypatch, capsys):
    monkeypatch.setenv("ATTN_QAT_CUDA", "off")
    assert setup["find_cuda"]() is None
    assert "CPU kernels only" in capsys.readouterr().out


def test_an_old_cuda_is_refused_in_words(setup, monkeypatch, tmp_path, capsys):
    fake_nvcc(tmp_path, "12.4")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("ATTN_QAT_CUDA", "auto")
    assert setup["find_cuda"]() is None
    said = capsys.readouterr().out
    assert re.search(r"CPU kernels only: .*nvcc is CUDA 12\.4, the targets need 12\.9", said)
    monkeypatch.setenv("ATTN_QAT_CUDA", "on")
    with pytest.raises(SystemExit, match=r"CUDA 12\.4, the targets need 12\.9"):
        setup["find_cuda"]()


def test_a_cuda_without_its_runtime_is_refused_in_words(setup, monkeypatch, tmp_path):
    fake_nvcc(tmp_path, "13.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("ATTN_QAT_CUDA", "on")
    with pytest.raises(SystemExit, match="has no CUDA runtime"):
        setup["find_cuda"]()


def test_an_unknown_cuda_mode_is_refused(setup, monkeypatch):
    monkeypatch.setenv("ATTN_QAT_CUDA", "yes")
    with pytest.raises(SystemExit, match="ATTN_QAT_CUDA is 'yes', takes on, off or auto"):
        setup["find_cuda"]()


def test_kernels_pause_only_when_asked_to(setup, monkeypatch, capsys):
    """Then they may spill; serialised products fail every build."""
    monkeypatch.delenv("ATTN_QAT_INJECT_DELAYS", raising=False)
    usual = setup["race_hunt"]()
    assert usual[0] == [] and re.search(usual[1], "4 bytes spill stores") and re.search(usual[1], "(C7510)")
    monkeypatch.setenv("ATTN_QAT_INJECT_DELAYS", "0")
    assert setup["race_hunt"]() == usual
    monkeypatch.setenv("ATTN_QAT_INJECT_DELAYS", "1")
    flags, refused = setup["race_hunt"]()
    assert flags == ["-DATTN_QAT_INJECT_DELAYS"] and "not for use" in capsys.readouterr().out
    assert not re.search(refused, "4 bytes spill stores") and re.search(refused, "(C7510)")
    monkeypatch.setenv("ATTN_QAT_INJECT_DELAYS", "yes")
    with pytest.raises(SystemExit, match="ATTN_QAT_INJECT_DELAYS is 'yes', takes 0 or 1"):
        setup["race_hunt"]()


def test_a_missing_compiler_is_named(setup, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(SystemExit, match=r"no C\+\+ compiler 'no-such-compiler': install g\+\+"):
        setup["find_cxx"]()


def test_other_systems_are_refused_in_words(setup, monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit, match="Linux only"):
        setup["build"]("0")


def test_building_without_torch_says_what_to_install(tmp_path):
    """In an environment of its own that has setuptools and no torch."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    site = tmp_path / "site"
    site.mkdir()
    folder = Path(setuptools.__file__).parents[1]
    for name in ("setuptools", "pkg_resources", "_distutils_hack"):
        if (folder / name).exists():
            (site / name).symlink_to(folder / name)
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONNOUSERSITE": "1"}
    command = [str(venv / "bin" / "python"), "setup.py", "-q", "build_ext", f"--build-lib={tmp_path / 'lib'}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "pip install 'torch>=2.10'" in done.stderr


def test_the_wheel_serves_every_python_and_runs(tmp_path):
    """Built from the sources as pip does it, then imported from where it is unpacked."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps"]
    subprocess.run([*command, "-w", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"attn_qat-.*-py3-none-\w*linux\w*\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert "attn_qat/libattn_qat.so" in names
    assert not [name for name in names if not name.startswith(("attn_qat/", "attn_qat-"))]
    code = "import torch, attn_qat; print(attn_qat.__file__); attn_qat.fake_quantize(torch.ones(16))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path / "site")})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "site"))
