"""Memory grows with the sequence length, never with its square. Each size runs in a process of its own."""

import json
import subprocess
import sys

import pytest

MEASURE = r"""
import json, re, sys
import torch, attn_qat

length, device = int(sys.argv[1]), sys.argv[2]
MB = 2**20


def inputs(length):
    return [torch.randn(1, 4, length, 128, dtype=torch.bfloat16, device=device) for _ in range(4)]


def resident(name):
    # VmRSS: now; VmHWM: the highest since the process began (ru_maxrss also counts the parent process)
    return int(re.search(name + r":\s+(\d+) kB", open("/proc/self/status").read())[1]) * 1024


def forward(q, k, v):
    return attn_qat.forward(q, k, v, 128**-0.5, False, "fp4")


def backward(q, k, v, grad_out, saved):
    return attn_qat.backward(grad_out, q, k, v, saved[1], saved[2], 128**-0.5, False, "fp4", saved[3])


def growth(function, *args):
    # MiB above what was resident before and what the call returns
    if device == "cpu":
        before = resident("VmRSS")
        result = function(*args)
        peak = resident("VmHWM")
    else:
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = function(*args)
        peak = torch.cuda.max_memory_allocated(device)
    returned = sum(x.numel() * x.element_size() for x in result)
    return (peak - before - returned) / MB, result


small = inputs(64)
backward(*small, forward(*small[:3]))  # threads, libraries and first-call caches
q, k, v, grad_out = inputs(length)
forward_growth, saved = growth(forward, q, k, v)
backward_growth, _ = growth(backward, q, k, v, grad_out, saved)
print(json.dumps({"forward": forward_growth, "backward": backward_growth}))
"""


@pytest.fixture(scope="module")
def growth(device):
    """MiB of forward and backward at (1, 4, S, 128) above inputs and outputs, for two lengths."""

    def measure(length):
        command = [sys.executable, "-c", MEASURE, str(length), str(device)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    return {length: measure(length) for length in (4096, 8192)}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_peak(growth, direction):
    """At 8,192 one FP32 S x S matrix of one head alone takes 256 MiB, and four heads 1 GiB."""
    assert growth[8192][direction] < 200


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_linear(growth, direction):
    """Twice the length takes at most twice the memory; 8 MiB are for the allocator."""
    assert growth[8192][direction] <= 2 * growth[4096][direction] + 8
