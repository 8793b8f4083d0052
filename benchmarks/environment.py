"""Where and with what a run was made: the part of its record that is not a measurement."""

from __future__ import annotations

import datetime
import os
import subprocess
from pathlib import Path

import attn_qat
import torch


def describe(device: torch.device) -> dict:
    cuda = device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "device": torch.cuda.get_device_name(device) if cuda else _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "instruction_sets": attn_qat.build_info().get("cpu"),
        "load": None if cuda else round(os.getloadavg()[0], 2),
    }


def clocks(device: torch.device) -> dict | None:
    """Clocks, power and temperature of a CUDA device now; None on the CPU or without nvidia-smi."""
    if device.type != "cuda":
        return None
    fields = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    command = ["nvidia-smi", f"--id=GPU-{uuid.removeprefix('GPU-')}", f"--query-gpu={fields}"]
    output = _output_of([*command, "--format=csv,noheader,nounits"])
    names = ("sm_mhz", "memory_mhz", "sm_max_mhz", "watts", "celsius")
    return dict(zip(names, map(str.strip, output.split(",")), strict=True)) if output else None


def _commit() -> str:
    """Of the working copy, '+' behind it if that has changes; else of the built library."""
    here = str(Path(__file__).resolve().parent)
    commit = _output_of(["git", "-C", here, "rev-parse", "--short=12", "HEAD"])
    if commit is None:
        return attn_qat.build_info().get("commit", "")
    return commit + ("+" if _output_of(["git", "-C", here, "status", "--porcelain"]) else "")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    return f"{os.uname().machine}, {os.cpu_count()} cores"


def _output_of(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
