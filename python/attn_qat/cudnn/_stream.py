"""`current_stream`: from whatever names a CUDA stream to torch working on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# The null stream and cudaStreamLegacy are torch's default stream. As an ExternalStream, a null handle has
# become a new stream in some versions of torch.
DEFAULT_STREAM_HANDLES = (0, 1)
# cudaStreamPerThread: another stream in every host thread, so that none can be named for it.
PER_THREAD_HANDLE = 2


def stream_handle(stream) -> int:
    """The cudaStream_t of an object with `.cuda_stream`, or of one that `int` takes, such as a CUstream."""
    handle = getattr(stream, "cuda_stream", stream)
    if isinstance(handle, (bool, float)) or not hasattr(handle, "__int__"):
        raise TypeError(
            f"current_stream is of type {type(stream).__name__}, takes None, a torch.cuda.Stream, "
            "an object with .cuda_stream or int(), or a cudaStream_t as an integer"
        )
    handle = int(handle)
    if handle == PER_THREAD_HANDLE:
        raise ValueError(f"current_stream is cudaStreamPerThread ({handle}), takes the handle of one stream")
    return handle


@contextmanager
def on_stream(stream, device: torch.device) -> Iterator[None]:
    """Work on `stream`; None: on torch's current stream of `device`. Nothing is recorded or awaited."""
    if stream is None:
        yield
        return
    if device.type != "cuda":
        raise ValueError(
            f"current_stream is {stream!r}, takes None for tensors on {device}: it has no streams"
        )
    handle = stream_handle(stream)
    if isinstance(stream, torch.cuda.Stream):
        if stream.device != device:
            raise ValueError(f"current_stream is on {stream.device}, takes a stream on {device}")
    elif handle in DEFAULT_STREAM_HANDLES:
        stream = torch.cuda.default_stream(device)
    else:
        stream = torch.cuda.ExternalStream(handle, device=device)
    with torch.cuda.stream(stream):
        yield
