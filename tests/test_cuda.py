"""What only a GPU shows: streams, graphs, threads, the other device, problems past 2^31 elements."""

import threading
from dataclasses import replace

import pytest
import torch
from cases import RECIPES, Shape, make_case
from contract import check_backward, check_forward

import attn_qat

ops = torch.ops.attn_qat


@pytest.fixture(autouse=True)
def cuda(device):
    if device.type != "cuda":
        pytest.skip("needs pytest --device cuda")
    return device


def run(case, recipe="fp4"):
    saved = case.forward(recipe)
    return *saved, *case.backward(recipe, saved)


def assert_same(got, want):
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


def test_side_stream_waits_for_what_it_wrote(cuda):
    """C14a: no synchronisation between a long kernel on the caller's stream and the operators."""
    case = make_case(Shape(1, 4, 4, 512, 512, 128), cuda)
    want = run(case)
    late = case.map(torch.zeros_like)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(cuda)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for name in ("q", "k", "v", "grad_out"):
            getattr(late, name).copy_(getattr(case, name))
        got = run(late)
    stream.synchronize()
    assert_same(got, want)


@pytest.mark.parametrize("recipe", RECIPES)
def test_graph_replays_on_new_values(cuda, recipe):
    """C14b: capture once, overwrite the inputs in place, replay."""
    shape = Shape(1, 4, 2, 300, 300, 128, causal=True)
    case, other = make_case(shape, cuda), make_case(shape, cuda, seed=1)
    run(case, recipe)  # what happens once per process must not be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(case, recipe)
    for name in ("q", "k", "v", "grad_out"):
        getattr(case, name).copy_(getattr(other, name))
    graph.replay()
    torch.cuda.synchronize()
    assert_same(got, run(other, recipe))


def test_out_variant_allocates_nothing(cuda):
    case = make_case(Shape(1, 4, 4, 512, 512, 128), cuda)
    saved = case.forward("fp4")
    want = case.backward("fp4", saved)
    workspace = torch.empty(ops.backward_workspace_bytes(case.q, case.k), dtype=torch.uint8, device=cuda)
    grads = {name: torch.empty_like(x) for name, x in zip(("dq", "dk", "dv"), want)}
    args = case.backward_args("fp4", saved)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats(cuda)["allocation.all.allocated"]
    ops.backward.out(*args, workspace, **grads)
    assert torch.cuda.memory_stats(cuda)["allocation.all.allocated"] == before
    assert_same(grads.values(), want)


def test_two_threads_with_their_own_streams(cuda):
    """C14c: 100 calls each on different shapes, every one equal to its serial result."""
    shapes = Shape(1, 2, 2, 200, 300, 64), Shape(2, 3, 1, 129, 129, 128, causal=True)
    cases = [make_case(shape, cuda, seed=i) for i, shape in enumerate(shapes)]
    wants = [run(case) for case in cases]
    torch.cuda.synchronize()
    failures = []

    def work(case, want):
        with torch.cuda.stream(torch.cuda.Stream(cuda)):
            for _ in range(100):
                got = run(case)
                torch.cuda.current_stream().synchronize()
                if not all(map(torch.equal, got, want)):
                    failures.append(case.q.shape)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(cases, wants)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_other_device_is_current(cuda):
    """Tensors on one device while another is current; the current device stays."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = make_case(Shape(1, 2, 2, 200, 200, 128), "cuda:0")
    want = [x.cpu() for x in run(case)]
    for tensors, current in (("cuda:1", 0), ("cuda:0", 1)):
        with torch.cuda.device(current):
            got = [x.cpu() for x in run(case.map(lambda x, to=tensors: x.to(to)))]
            assert torch.cuda.current_device() == current
        assert_same(got, want)


def test_tensors_on_different_devices_are_refused(cuda):
    case = make_case(Shape(), cuda)
    with pytest.raises((ValueError, RuntimeError), match="k is on cpu"):
        ops.forward(case.q, case.k.cpu(), case.v, 0.1, False, "fp4")


def test_unserved_problem_raises_not_implemented(cuda):
    q = torch.randn(1, 1, 32, 48, device=cuda, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="head_dim 64 or 128"):
        attn_qat.forward(q, q, q, 0.1)
    with pytest.raises(NotImplementedError, match="bfloat16 or float16"):
        attn_qat.forward(*[torch.randn(1, 1, 32, 64, device=cuda)] * 3, 0.1)


def needs_memory(device, gib: int):
    free = torch.cuda.mem_get_info(device)[0]
    if free < gib << 30:
        pytest.skip(f"needs {gib} GiB of free GPU memory, has {free >> 30}")


def test_more_than_2_to_31_elements(cuda):
    """The last batch entry equals that entry run alone."""
    needs_memory(cuda, 100)
    shape = (16400, 8, 128, 128)
    generator = torch.Generator(cuda).manual_seed(0)
    q, k, v, grad_out = (
        torch.empty(shape, device=cuda, dtype=torch.bfloat16).normal_(generator=generator) for _ in range(4)
    )
    out, high_precision_out, lse, row_exponent = ops.forward(q, k, v, 0.1, True, "fp4")
    grads = ops.backward(grad_out, q, k, v, high_precision_out, lse, 0.1, True, "fp4", row_exponent)
    last = [x[-1:].contiguous() for x in (q, k, v, grad_out)]
    want = ops.forward(*last[:3], 0.1, True, "fp4")
    assert_same([x[-1:] for x in (out, high_precision_out, lse, row_exponent)], want)
    alone = ops.backward(last[3], *last[:3], *want[1:3], 0.1, True, "fp4", want[3])
    assert_same([x[-1:] for x in grads], alone)


@pytest.mark.parametrize("axis", [-1, -2])
def test_fake_quantize_past_2_to_31(cuda, axis):
    needs_memory(cuda, 20)
    x = torch.empty(2**31 // 128 + 64, 128, device=cuda, dtype=torch.bfloat16).normal_()
    assert torch.equal(ops.fake_quantize(x, axis)[-64:], ops.fake_quantize(x[-64:].clone(), axis))
    far = x[:: (x.shape[0] - 1)]  # two rows, 2^31 elements apart
    assert torch.equal(ops.fake_quantize(far, axis), ops.fake_quantize(far.clone(), axis))


def test_more_heads_than_a_grid_dimension(cuda):
    """B H above 65,535."""
    case = make_case(Shape(700, 100, 100, 16, 16, 64), cuda)
    got = run(case)
    last = case.map(lambda x: x[-1:].contiguous())
    assert_same([x[-1:] for x in got], run(last))


@pytest.mark.parametrize("recipe", RECIPES)
def test_long_sequence(cuda, recipe):
    """200,000 keys in one head: rows and keys at both ends against the reference on a slice."""
    length, rows = 200_000, 64
    case = make_case(Shape(1, 1, 1, rows, length, 128), cuda)
    check_backward(case, recipe, check_forward(case, recipe))
    square = make_case(Shape(1, 1, 1, length, length, 128), cuda)
    saved = square.forward(recipe)
    for first in (0, length - rows):
        part = replace(square, q=square.q[:, :, first : first + rows].contiguous())
        assert_same([x[:, :, first : first + rows] for x in saved], part.forward(recipe))
    assert all(bool(x.isfinite().all()) for x in square.backward(recipe, saved))
