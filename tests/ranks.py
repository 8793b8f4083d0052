"""Two processes of one process group, kept for all tests of a module: gloo on the CPU, NCCL on two GPUs."""

from __future__ import annotations

import queue
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before a group is made: docs/distributed.md, "Leaving"

COUNT = 2
PATIENCE = 120  # seconds, for a check and for a rank that waits for the other


def _serve(rank: int, rendezvous: str, device_type: str, requests, replies) -> None:
    torch.set_num_threads(1)
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device_type == "cuda" else "gloo"
    store = f"file://{rendezvous}"
    dist.init_process_group(
        backend, init_method=store, rank=rank, world_size=COUNT, timeout=timedelta(seconds=PATIENCE)
    )
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device_type, (COUNT,))
    while (request := requests.get()) is not None:
        check, arguments = request
        try:
            check(mesh, *arguments)
            replies.put((rank, None))
        except BaseException:  # whatever it is belongs to the test that asked
            replies.put((rank, traceback.format_exc()))
    dist.destroy_process_group()


class Ranks:
    """`run(check, *arguments)` calls check(mesh, *arguments) on each rank; mesh is one-dimensional."""

    def __init__(self, device_type: str, folder):
        self._device_type, self._folder, self._started = device_type, folder, 0
        self._processes = []

    def run(self, check, *arguments) -> None:
        """Raises AssertionError with the traceback of each rank that failed."""
        if not self._processes:
            self._start()
        for requests in self._requests:
            requests.put((check, arguments))
        failed = {}
        try:
            for _ in range(COUNT):
                rank, error = self._replies.get(timeout=PATIENCE + 30)
                if error:
                    failed[rank] = error
                    break  # the other may wait for it for long
        except queue.Empty:
            failed["some"] = "no answer"
        if failed:
            self.stop()
            raise AssertionError("\n".join(f"rank {rank}: {error}" for rank, error in failed.items()))

    def _start(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._started += 1
        rendezvous = str(self._folder / f"rendezvous{self._started}")
        self._requests, self._replies = [context.Queue() for _ in range(COUNT)], context.Queue()
        self._processes = [
            context.Process(
                target=_serve, args=(rank, rendezvous, self._device_type, requests, self._replies)
            )
            for rank, requests in enumerate(self._requests)
        ]
        for process in self._processes:
            process.start()

    def stop(self) -> None:
        for requests in getattr(self, "_requests", ()):
            requests.put(None)  # to all before one is waited for: NCCL leaves together
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes = []
