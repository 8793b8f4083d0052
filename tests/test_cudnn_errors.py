"""What attn_qat.cudnn refuses before it computes: by the argument's name, what it got and what it takes."""

import math
import re

import pytest
import torch
from cases import as_bshd
from cudnn_problem import KEYS, SAMPLES, Problem, assert_grads, compiled, shape, workspace_for

from attn_qat.cudnn import _options


@pytest.fixture
def problem(device):
    return Problem(shape(), device)


@pytest.fixture
def runtime(problem):
    return compiled(problem)


# Options


@pytest.mark.parametrize("head_chunk", [-1, True, 1.0, "1", None])
def test_head_chunk_that_is_no_size(head_chunk, problem):
    with pytest.raises(ValueError, match=f"head_chunk is {head_chunk!r}, takes a nonnegative integer"):
        problem.call(head_chunk=head_chunk)


def test_head_chunk_that_does_not_divide(device):
    with pytest.raises(ValueError, match="head_chunk is 3, takes .* divides the 4 heads"):
        Problem(shape(heads=4), device).call(head_chunk=3)


@pytest.mark.parametrize("limit", [-1, True, 1e9, "1"])
def test_workspace_limit_that_is_no_size(limit, problem):
    match = f"workspace_limit_bytes is {re.escape(repr(limit))}, takes a nonnegative integer or None"
    with pytest.raises(ValueError, match=match):
        problem.call(workspace_limit_bytes=limit)


@pytest.mark.parametrize("backend", ["frost", "triton"])
def test_backend_of_cudnn_frontend_is_not_replaced(backend, problem):
    with pytest.raises(NotImplementedError, match=f"backend is '{backend}'.* takes 'auto' or 'attn_qat'"):
        problem.call(backend=backend)


@pytest.mark.parametrize("backend", ["cutedsl", "", None, 0])
def test_backend_that_nobody_has(backend, problem):
    with pytest.raises(ValueError, match=f"backend is {backend!r}, takes 'auto' or 'attn_qat'"):
        problem.call(backend=backend)


@pytest.mark.parametrize("scale", [0.0, -0.5, math.inf, -math.inf, math.nan, 1e-60, 1e60])
def test_softmax_scale_that_is_no_scale(scale, problem, runtime):
    plan, arguments = runtime
    for refused in (
        lambda: problem.call(softmax_scale=scale),
        lambda: problem.plan(softmax_scale=scale).check_support(),
        lambda: plan.execute(**arguments, softmax_scale=scale),
    ):
        with pytest.raises(ValueError, match=f"^softmax_scale is {re.escape(f'{scale:g}')}, takes a finite"):
            refused()
    assert all(arguments[key].isnan().all() for key in KEYS), "something was computed"


@pytest.mark.parametrize("scale", ["x", [1.0], 10**400], ids=["text", "list", "too large"])
def test_softmax_scale_that_is_no_number(scale, problem, runtime):
    plan, arguments = runtime
    for refused in (
        lambda: problem.call(softmax_scale=scale),
        lambda: problem.plan(softmax_scale=scale),
        lambda: plan.execute(**arguments, softmax_scale=scale),
    ):
        with pytest.raises(ValueError, match="^softmax_scale is .*, takes a finite positive number"):
            refused()


@pytest.mark.parametrize("is_causal", ["False", 1, None])
def test_is_causal_that_is_no_bool(is_causal, problem):
    with pytest.raises(ValueError, match=f"^is_causal is {is_causal!r}, takes True or False"):
        problem.call(is_causal=is_causal)


# What a plan may not be made for


def misaligned(x):
    """The same values 8 bytes past an aligned address."""
    storage = torch.empty(x.numel() + 16, dtype=x.dtype, device=x.device)
    skip = 8 // x.element_size()
    return storage[skip : skip + x.numel()].view(x.shape).copy_(x)


def shrink(x, dim):
    return x.narrow(dim, 0, x.shape[dim] - 1).contiguous()


ROWS = [name for name in SAMPLES if name != "lse_tensor"]
WRONG_SAMPLES = [
    *((name, "dtype", lambda x: x.half(), "dtype float16, takes bfloat16") for name in ROWS),
    *((name, "rank", lambda x: x[0], "takes 4 dimensions") for name in ROWS),
    *((name, "layout", as_bshd, r"strides .* takes contiguous") for name in ROWS),
    ("lse_tensor", "dtype", lambda x: x.double(), "dtype float64, takes float32"),
    ("lse_tensor", "rank", lambda x: x[..., None], "takes 3 dimensions"),
    ("lse_tensor", "layout", lambda x: x.mT.contiguous().mT, r"strides .* takes contiguous"),
    ("lse_tensor", "rows", lambda x: shrink(x, 2), r"\(1, 2, 36\), takes \(1, 2, 37\)"),
    ("q_tensor", "head dim", lambda x: x[..., :64].contiguous(), "head dim 64, takes 128"),
    ("k_tensor", "head dim", lambda x: x[..., :64].contiguous(), "head dim 64, takes 128"),
    ("k_tensor", "grouped heads", lambda x: shrink(x, 1), r"\(1, 1, 45, 128\), takes \(1, 2, 45, 128\)"),
    ("k_tensor", "batch", lambda x: x.repeat(2, 1, 1, 1), r"\(2, 2, 45, 128\), takes \(1, 2, 45, 128\)"),
    ("v_tensor", "keys", lambda x: shrink(x, 2), r"\(1, 2, 44, 128\), takes \(1, 2, 45, 128\)"),
    ("do_tensor", "rows", lambda x: shrink(x, 2), r"\(1, 2, 36, 128\), takes \(1, 2, 37, 128\)"),
    (
        "high_precision_o_tensor",
        "rows",
        lambda x: shrink(x, 2),
        r"\(1, 2, 36, 128\), takes \(1, 2, 37, 128\)",
    ),
    *(
        ("q_tensor", f"no {what}", lambda x, d=d: x.narrow(d, 0, 0), "takes at least 1 of B, H and S")
        for d, what in enumerate(("batch", "head", "row"))
    ),
    ("k_tensor", "no key", lambda x: x[:, :, :0], "takes at least 1 of B, H and S"),
    *((name, "device", lambda x: x.to("meta"), "on meta, takes (cpu|cuda:0)") for name in SAMPLES[1:]),
]


@pytest.mark.parametrize(
    "name, change, text",
    [pytest.param(name, *rest, id=f"{name} {what}") for name, what, *rest in WRONG_SAMPLES],
)
def test_refused_sample(name, change, text, problem):
    problem.inputs[name] = change(problem.inputs[name])
    for refused in (problem.call, problem.plan().check_support, problem.plan().compile):
        with pytest.raises(ValueError, match=rf"\b{name} (has|is) .*{text}"):
            refused()


@pytest.mark.parametrize("name", SAMPLES)
def test_sample_that_is_no_tensor(name, problem):
    problem.inputs[name] = [0.0]
    for refused in (problem.call, problem.plan):
        with pytest.raises(TypeError, match=rf"{name} is of type list, takes a torch.Tensor"):
            refused()


@pytest.mark.parametrize("seq_q, seq_kv", [(16, 15), (15, 16)])
def test_causal_with_unequal_lengths(seq_q, seq_kv, device):
    """attn_qat's own masks align bottom-right; cuDNN's operator refuses, and so does this."""
    problem = Problem(shape(seq_q=seq_q, seq_kv=seq_kv, causal=True), device)
    match = f"causal QAT backward requires equal lengths: .*S_q {seq_q}, .*S_kv {seq_kv}"
    for refused in (problem.call, problem.plan().check_support):
        with pytest.raises(ValueError, match=match):
            refused()


def test_device_that_is_neither_cpu_nor_cuda(problem):
    problem.inputs = {name: x.to("meta") for name, x in problem.inputs.items()}
    with pytest.raises(RuntimeError, match="q_tensor is on meta, takes CPU or CUDA tensors"):
        problem.plan().check_support()


@pytest.mark.parametrize("targets, said", [(("sm_90a", "sm_100a"), "sm_90a sm_100a"), ((), "CPU only")])
def test_gpu_without_kernels(targets, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(_options, "cuda_targets", lambda: targets)
    with pytest.raises(NotImplementedError, match=f"compute capability 8.6, takes .*{said}"):
        _options.check_device_is_served(torch.device("cuda:0"))


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3), (12, 0), (12, 1)])
def test_gpu_with_kernels(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(
        _options, "cuda_targets", lambda: ("sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a")
    )
    _options.check_device_is_served(torch.device("cuda:0"))


# What execute may not be given


RUNTIME = (*SAMPLES, *KEYS)
WRONG_AT_RUNTIME = {
    "type": (lambda x: x.tolist(), "is of type list, takes a torch.Tensor"),
    "shape": (lambda x: shrink(x, 2), r"has shape \(1, 2, (36|44).*this plan takes \(1, 2, (37|45)"),
    "rank": (lambda x: x[None], r"has shape \(1, 1, 2.*this plan takes \(1, 2"),
    "dtype": (lambda x: x.to(torch.float16), "has dtype float16, this plan takes (bfloat16|float32)"),
    "strides": (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        r"has strides \(.*this plan takes \(",
    ),
    "device": (lambda x: x.to("meta"), "is on meta, this plan takes (cpu|cuda:0)"),
    "address": (misaligned, "address that is no multiple of 16 bytes"),
}


@pytest.mark.parametrize("what", WRONG_AT_RUNTIME)
@pytest.mark.parametrize("name", RUNTIME)
def test_refused_by_execute(name, what, runtime):
    plan, arguments = runtime
    change, text = WRONG_AT_RUNTIME[what]
    with pytest.raises(TypeError if what == "type" else ValueError, match=rf"^{name} .*{text}"):
        plan.execute(**{**arguments, name: change(arguments[name])})
    assert all(arguments[key].isnan().all() for key in KEYS), "something was computed"


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("what", WRONG_AT_RUNTIME)
def test_given_gradient_that_does_not_fit(key, what, problem):
    change, text = WRONG_AT_RUNTIME[what]
    with pytest.raises(TypeError if what == "type" else ValueError, match=rf"^{key} .*{text}"):
        problem.call(**{key: change(problem.grads()[key])})


WRONG_WORKSPACES = {
    "type": (lambda w: None, "is of type NoneType, takes a torch.Tensor"),
    "size": (lambda w: w[:-1], r"must contain at least \d+ bytes, has \d+"),
    "dtype": (lambda w: w.view(torch.int8), "has dtype int8, takes uint8"),
    "rank": (lambda w: w[None], r"has shape \(1, \d+\), takes one dimension"),
    "strides": (lambda w: torch.cat((w, w))[::2], "has stride 2, takes contiguous bytes"),
    "device": (lambda w: w.to("meta"), "is on meta, this plan takes (cpu|cuda:0)"),
    "address": (lambda w: torch.cat((w, w))[8:], "address that is no multiple of 16 bytes"),
}


@pytest.mark.parametrize("what", WRONG_WORKSPACES)
def test_refused_workspace(what, runtime):
    plan, arguments = runtime
    change, text = WRONG_WORKSPACES[what]
    workspace = change(arguments["workspace"])
    with pytest.raises(TypeError if what == "type" else ValueError, match=f"^workspace .*{text}"):
        plan.execute(**{**arguments, "workspace": workspace})
    assert all(arguments[key].isnan().all() for key in KEYS), "something was computed"


@pytest.mark.parametrize("offset", [0, 16, 32, 48, 64])
def test_workspace_at_any_multiple_of_16_bytes(offset, runtime, problem, device):
    """16 bytes are the published alignment, and no byte beyond the published size is touched."""
    plan, arguments = runtime
    size = plan.scratch_workspace_bytes()
    arena = torch.full((size + 192,), 7, dtype=torch.uint8, device=device)
    assert arena.data_ptr() % 64 == 0
    plan.execute(**{**arguments, "workspace": arena[offset : offset + size]})
    assert_grads([arguments[key] for key in KEYS], problem.want())
    assert (arena[:offset] == 7).all() and (arena[offset + size :] == 7).all()


def test_workspace_may_be_larger(runtime, problem, device):
    plan, arguments = runtime
    plan.execute(**{**arguments, "workspace": workspace_for(plan, device, extra=1000)})
    assert_grads([arguments[key] for key in KEYS], problem.want())


def overlapping(first, second):
    """Both in one allocation, the first 64 bytes of the second being the last of the first."""
    sizes = [x.numel() * x.element_size() for x in (first, second)]
    arena = torch.zeros(sum(sizes) - 64, dtype=torch.uint8, device=first.device)
    starts = 0, sizes[0] - 64
    return [
        arena[start : start + size].view(x.dtype).view(x.shape)
        for x, start, size in zip((first, second), starts, sizes)
    ]


OVERLAPS = [(written, other) for written in KEYS for other in (*SAMPLES, "workspace")]
OVERLAPS += [(sample, "workspace") for sample in SAMPLES] + [KEYS[:2], KEYS[1:], KEYS[::2]]


@pytest.mark.parametrize("first, second", OVERLAPS)
def test_written_memory_may_not_overlap(first, second, device):
    problem = Problem(shape(seq_q=32, seq_kv=32), device)  # whole multiples of 64 bytes
    plan, arguments = compiled(problem)
    plan.execute(**arguments)
    arguments[first], arguments[second] = overlapping(arguments[first], arguments[second])
    both = rf"^({first} overlaps {second}|{second} overlaps {first}) in memory, takes storage of its own"
    with pytest.raises(ValueError, match=both):
        plan.execute(**arguments)
