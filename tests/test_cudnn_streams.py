"""`current_stream` of attn_qat.cudnn: what names a stream, and work that is ordered on it."""

import pytest
import torch
from cudnn_problem import KEYS, Problem, assert_grads, compiled, shape

from attn_qat.cudnn import _stream


class Torch:
    """A stream object like torch.cuda.Stream."""

    def __init__(self, handle):
        self.cuda_stream = handle


class Driver:
    """A stream object like cuda.bindings.driver.CUstream."""

    def __init__(self, handle):
        self.handle = handle

    def __int__(self):
        return self.handle


def test_stream_on_the_cpu_is_refused():
    problem = Problem(shape(), "cpu")
    plan, arguments = compiled(problem)
    for refused in (
        lambda: problem.call(current_stream=0),
        lambda: plan.execute(**arguments, current_stream=0),
    ):
        with pytest.raises(ValueError, match="current_stream is 0, takes None for tensors on cpu"):
            refused()
    assert all(arguments[key].isnan().all() for key in KEYS)


@pytest.mark.parametrize("stream", [7, Driver(7), Torch(7)], ids=["int", "int()", ".cuda_stream"])
def test_handle_of_a_stream(stream):
    assert _stream.stream_handle(stream) == 7


@pytest.mark.parametrize("stream", ["7", 7.0, True, object(), Torch(None)], ids=lambda x: type(x).__name__)
def test_no_stream(stream):
    with pytest.raises(TypeError, match=f"current_stream is of type {type(stream).__name__}, takes None"):
        _stream.stream_handle(stream)


def test_per_thread_stream_names_no_stream():
    with pytest.raises(ValueError, match=r"current_stream is cudaStreamPerThread \(2\)"):
        _stream.stream_handle(Driver(2))


def test_stream_of_cuda_bindings():
    driver = pytest.importorskip("cuda.bindings.driver")
    assert _stream.stream_handle(driver.CUstream(7)) == 7


@pytest.fixture
def cuda(device):
    if device.type != "cuda":
        pytest.skip("needs pytest --device cuda")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


STREAMS = {
    "torch.cuda.Stream": lambda stream: stream,
    "int": lambda stream: stream.cuda_stream,
    "int()": lambda stream: Driver(stream.cuda_stream),
    ".cuda_stream": lambda stream: Torch(stream.cuda_stream),
}


@pytest.mark.parametrize("named", STREAMS)
def test_work_is_ordered_on_the_given_stream(named, cuda):
    """The inputs get their values on the side stream, late; the call, made outside it, still sees them."""
    problem = Problem(shape(heads=4, seq_q=512, seq_kv=512), cuda)
    want = problem.want()
    values = {name: x.clone() for name, x in problem.inputs.items()}
    for x in problem.inputs.values():
        x.fill_(1)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(cuda)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for name, x in problem.inputs.items():
            x.copy_(values[name])
    current = torch.cuda.current_stream(cuda)
    result = problem.call(current_stream=STREAMS[named](stream))
    assert torch.cuda.current_stream(cuda) == current
    stream.synchronize()
    assert_grads(result, want)


def test_stream_is_used_under_capture(cuda):
    """execute can be captured; the replay reads new values."""
    problem, other = Problem(shape(), cuda), Problem(shape(), cuda, seed=1)
    plan, arguments = compiled(problem)
    plan.execute(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.execute(**arguments, current_stream=torch.cuda.current_stream(cuda))
    for name, x in problem.inputs.items():
        x.copy_(other.inputs[name])
    graph.replay()
    assert_grads([arguments[key] for key in KEYS], other.want())


@pytest.mark.parametrize("handle", [0, 1])
def test_null_and_legacy_handle_are_the_default_stream(handle, cuda):
    with torch.cuda.stream(torch.cuda.Stream(cuda)), _stream.on_stream(handle, cuda):
        assert torch.cuda.current_stream(cuda) == torch.cuda.default_stream(cuda)


def test_stream_of_another_device(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    problem, other = Problem(shape(), "cuda:0"), torch.cuda.Stream("cuda:1")
    with pytest.raises(ValueError, match="current_stream is on cuda:1, takes a stream on cuda:0"):
        problem.call(current_stream=other)


def test_other_device_is_current(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    want = [x.cpu() for x in Problem(shape(), "cuda:0").want()]
    with torch.cuda.device(0):
        problem = Problem(shape(), "cuda:1")
        for stream in (None, torch.cuda.Stream("cuda:1").cuda_stream):
            torch.cuda.synchronize("cuda:1")
            result = problem.call(current_stream=stream)
            assert torch.cuda.current_device() == 0
            torch.cuda.synchronize("cuda:1")
            assert_grads(result, want)
