"""Peak memory of a call, above its inputs and outputs.

Two numbers: `saved`, what preparing the call left behind (for a backward: what the forward saved), and
`peak`, what the call itself held at most, its outputs not counted. On CUDA torch's allocator knows. On the
CPU the resident set of a fresh process does: this file is also the program that such a process runs.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from cases import Case
from peers import PEERS
from problem import Problem


def measure(peer_name: str, problem: Problem) -> dict[str, int]:
    """{"saved_bytes": ..., "peak_bytes": ...}"""
    measure_there = _on_cuda if problem.device.type == "cuda" else _in_a_fresh_process
    return measure_there(peer_name, problem)


def _bytes_of(tensors) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _on_cuda(peer_name: str, problem: Problem) -> dict[str, int]:
    device = problem.device
    before = torch.cuda.memory_allocated(device)
    call = PEERS[peer_name].prepare(problem)
    call()  # what is compiled or cached once is not what a call needs
    torch.cuda.synchronize(device)
    saved = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    outputs = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - saved - _bytes_of(outputs)
    return {"saved_bytes": saved - before, "peak_bytes": max(peak, 0)}


def _in_a_fresh_process(peer_name: str, problem: Problem) -> dict[str, int]:
    request = {
        "peer": peer_name,
        "op": problem.op,
        "case": asdict(problem.case),
        "recipe": problem.recipe,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "inputs": problem.inputs,
        "threads": torch.get_num_threads(),
    }
    # Freed blocks go back to the system at once, so that the resident set is what is in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), json.dumps(request)],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"memory of {peer_name}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)


def _resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _serve(request: dict) -> dict[str, int]:
    torch.set_num_threads(request["threads"])
    peer = PEERS[request["peer"]]
    case, dtype, device = Case(**request["case"]), getattr(torch, request["dtype"]), torch.device("cpu")
    problem = Problem(request["op"], case, request["recipe"], dtype, device, request["inputs"])
    peer.prepare(problem.with_seq(min(256, problem.case.seq)))()  # threads, code pages, what libraries keep

    def trimmed() -> int:
        ctypes.CDLL(None).malloc_trim(0)
        return _resident("VmRSS")

    problem = problem.filled()
    before = trimmed()
    call = peer.prepare(problem)
    saved = trimmed()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    outputs = call()
    peak = _resident("VmHWM") - saved - _bytes_of(outputs)
    return {"saved_bytes": max(saved - before, 0), "peak_bytes": max(peak, 0)}


if __name__ == "__main__":
    print(json.dumps(_serve(json.loads(sys.argv[1]))))
