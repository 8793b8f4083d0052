"""Times several callables in one run. They take turns: a change of clock or load meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

MIN_SAMPLES, MAX_SAMPLES = 5, 1000
SHORTEST_SAMPLE_S = 0.005  # on the CPU a sample repeats a short call until the clock resolves it well
SAMPLES_IN_FLIGHT = 8  # on the GPU: rounds queued before the host waits


@dataclass(frozen=True)
class Timing:
    samples: list[float]  # seconds a call

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Half of the interquartile range over the median."""
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / 2 / self.median


def measure(calls: dict[str, Callable], device: torch.device, seconds: float) -> dict[str, Timing]:
    """Timings by name; about `seconds` for each callable."""
    sampler = _CudaSampler(device) if device.type == "cuda" else _CpuSampler()
    estimates = {name: sampler.estimate(call) for name, call in calls.items()}
    budget = seconds * len(calls)
    rounds = budget / sum(sampler.seconds_a_sample(estimate) for estimate in estimates.values())
    rounds = int(min(max(rounds, MIN_SAMPLES), MAX_SAMPLES))
    names = list(calls)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        first = i % len(names)  # nobody always follows the same neighbour
        for name in names[first:] + names[:first]:
            sampler.sample(calls[name], estimates[name], samples[name])
    sampler.finish()
    return {name: Timing(samples[name]) for name in names}


class _CpuSampler:
    """Wall-clock time of a call. Caches are left as the other callables left them."""

    def estimate(self, call: Callable) -> float:
        call()  # first calls allocate, build kernels, page memory in
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def repeats(self, estimate: float) -> int:
        return max(1, round(SHORTEST_SAMPLE_S / estimate))

    def seconds_a_sample(self, estimate: float) -> float:
        return estimate * self.repeats(estimate)

    def sample(self, call: Callable, estimate: float, samples: list[float]) -> None:
        repeats = self.repeats(estimate)
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        samples.append((time.perf_counter() - start) / repeats)

    def finish(self) -> None:
        pass


class _CudaSampler:
    """Time between two events around a call, after the L2 cache has been overwritten.

    Overwriting also keeps the GPU busy while the host enqueues the call, so that the time is the device's
    unless the host is slower than that write.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.pending: list[tuple[torch.cuda.Event, torch.cuda.Event, list[float]]] = []
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self.flush = torch.empty(max(4 * l2_bytes, 1 << 28), dtype=torch.int8, device=device)

    def estimate(self, call: Callable) -> float:
        for _ in range(2):  # first calls compile and tune
            call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def seconds_a_sample(self, estimate: float) -> float:
        return estimate + 2e-4  # the flush

    def sample(self, call: Callable, estimate: float, samples: list[float]) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        start.record()
        call()
        end.record()
        self.pending.append((start, end, samples))
        if len(self.pending) >= SAMPLES_IN_FLIGHT:
            self.finish()

    def finish(self) -> None:
        for start, end, samples in self.pending:
            end.synchronize()
            samples.append(start.elapsed_time(end) / 1e3)
        self.pending.clear()


def in_cuda_graph(prepare: Callable[[], Callable], device: torch.device) -> Callable:
    """A callable that replays what `prepare` returns from a CUDA graph: its cost without the host's part.

    Preparation is on the capturing stream, too, since autograd runs a backward on the stream of its forward.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        call = prepare()
        for _ in range(3):  # compilation and first allocations cannot be captured
            call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = call()

    def replay():
        graph.replay()
        return outputs

    return replay
