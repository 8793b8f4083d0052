"""attn_qat.cudnn: cuDNN frontend's call and plan, by name, number and option; the page and the example."""

import copy
import inspect
import math
import pickle
import re
import runpy
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from cases import make_case
from contract import assert_close_up_to_ties, assert_same_bits
from cudnn_problem import KEYS, Problem, assert_grads, compiled, shape, workspace_for
from torch.utils._python_dispatch import TorchDispatchMode

import attn_qat
from attn_qat.cudnn import Nvfp4AttentionQatBackward, nvfp4_attention_qat_backward

ROOT = Path(__file__).parents[1]
BACKWARD_OUT = torch.ops.attn_qat.backward.out


@pytest.fixture
def problem(device):
    return Problem(shape(), device)


@pytest.fixture
def runtime(problem):
    return compiled(problem)


class Recorder(TorchDispatchMode):
    """The operators that run inside."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


# Numbers

NUMBERS = (
    shape(seq_q=64, seq_kv=64),
    shape(),
    shape(seq_q=63, seq_kv=63, causal=True),
    shape(batch=2, heads=3, seq_q=130, seq_kv=17),
)


@pytest.mark.parametrize("shape", NUMBERS, ids=str)
def test_gradients_against_the_reference(shape, device):
    problem = Problem(shape, device)
    got = problem.call(softmax_scale=problem.case.softmax_scale)
    reference_at = lambda nudge: problem.case.reference_backward("cudnn", problem.saved, nudge)  # noqa: E731
    assert_close_up_to_ties(tuple(got), reference_at, KEYS)


@pytest.mark.parametrize("shape", NUMBERS, ids=str)
def test_the_bits_of_the_operator(shape, device):
    problem = Problem(shape, device)
    for grad, x, want in zip(
        problem.call(), (problem.case.q, problem.case.k, problem.case.v), problem.want()
    ):
        assert grad.is_contiguous() and grad.shape == x.shape
        assert_same_bits(grad, want)


def test_softmax_scale_is_used_and_defaults_to_the_root_of_128(problem):
    default = problem.call()
    assert_grads(problem.call(softmax_scale=1 / math.sqrt(128)), default)
    assert not torch.equal(problem.call(softmax_scale=0.3)[0], default[0])
    assert not torch.equal(problem.call(softmax_scale=0.05)[0], problem.call(softmax_scale=0.3)[0])
    assert_grads(problem.call(softmax_scale=1), problem.call(softmax_scale=1.0))


@pytest.mark.parametrize("length, factor", [(16, 0.9375), (64, 0.75), (512, 1.0), (2048, 0.0)])
def test_uniform_attention_has_the_dv_of_local_scales(length, factor, device):
    """Q = 0: P is 1 / S, and its FP4 value is what the published recipe makes of it, 0 from 2048 keys on."""
    zero = torch.zeros(1, 1, length, 128, dtype=torch.bfloat16, device=device)
    ones = torch.ones_like(zero)
    lse = torch.full((1, 1, length), math.log(length), device=device)
    dv = nvfp4_attention_qat_backward(ones, zero, zero, zero, zero, lse)["dv_tensor"]
    assert_same_bits(dv, torch.full_like(dv, factor))


def test_zero_blocks_and_masked_blocks(device):
    """All scales at their floor, and the upper triangle masked: dq = dk = 0, dv finite and not 0."""
    zero = torch.zeros(1, 1, 32, 128, dtype=torch.bfloat16, device=device)
    grad_out = make_case(shape(1, 1, 32, 32), device).grad_out
    lse = torch.arange(1, 33, device=device).log()[None, None]
    dq, dk, dv = nvfp4_attention_qat_backward(grad_out, zero, zero, zero, zero, lse, is_causal=True)
    assert_same_bits(dq, zero)
    assert_same_bits(dk, zero)
    assert dv.isfinite().all() and dv.abs().max() > 0


# The call


def test_signature_of_the_call():
    """Names, order, kinds and defaults that callers of cuDNN frontend rely on."""
    parameters = inspect.signature(nvfp4_attention_qat_backward).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [f"{name}_tensor" for name in ("do", "q", "k", "v", "high_precision_o", "lse")]
    assert {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} == {
        "softmax_scale": None,
        "is_causal": False,
        "dq_tensor": None,
        "dk_tensor": None,
        "dv_tensor": None,
        "current_stream": None,
        "backend": "auto",
        "head_chunk": 0,
        "workspace_limit_bytes": None,
    }


def test_signature_of_the_plan():
    samples = [f"sample_{name}" for name in ("q", "k", "v", "high_precision_o", "do", "lse")]
    parameters = inspect.signature(Nvfp4AttentionQatBackward).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == samples
    assert {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} == {
        "is_causal": False,
        "softmax_scale": None,
        "backend": "auto",
        "head_chunk": 0,
        "workspace_limit_bytes": None,
    }


def test_signature_of_execute():
    names = ("q", "k", "v", "high_precision_o", "do", "lse", "dq", "dk", "dv")
    parameters = list(inspect.signature(Nvfp4AttentionQatBackward.execute).parameters.values())[1:]
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [*(f"{name}_tensor" for name in names), "workspace"]
    assert {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} == {
        "softmax_scale": None,
        "current_stream": None,
    }


def test_result_answers_as_tuple_and_as_dict(problem):
    result = problem.call()
    dq, dk, dv = result
    assert isinstance(result, dict) and list(result.keys()) == list(KEYS) and len(result) == 3
    for index, (key, grad) in enumerate(zip(KEYS, (dq, dk, dv))):
        assert result[key] is grad and result[index] is grad
    for index in (3, -1):
        with pytest.raises(IndexError, match=f"{index}, takes 0 to 2"):
            result[index]
    with pytest.raises(KeyError):
        result["dq"]


@pytest.mark.parametrize("given", [KEYS, *((key,) for key in KEYS)], ids=" ".join)
def test_given_gradients_are_written(given, problem):
    buffers = {key: grad for key, grad in problem.grads().items() if key in given}
    result = problem.call(**buffers)
    assert all(result[key] is buffer for key, buffer in buffers.items())
    assert_grads(result, problem.want())


def test_inputs_are_only_read(problem):
    before = {name: x.clone() for name, x in problem.inputs.items()}
    problem.call()
    for name, x in problem.inputs.items():
        assert_same_bits(x, before[name], name)


def test_no_second_graph_is_recorded(problem):
    """The call is a backward itself: inputs that require gradients give plain tensors, given or new."""
    want = problem.want()
    for name in ("q_tensor", "k_tensor", "v_tensor", "do_tensor"):
        problem.inputs[name].requires_grad_()
    for result in (problem.call(), problem.call(**problem.grads())):
        assert not any(grad.requires_grad for grad in result)
        assert_grads(result, want)


def test_inputs_may_share_memory(device):
    """k is v, q is dO: only what is written needs storage of its own."""
    case = make_case(shape(), device)
    q, k, lse = case.q, case.k, torch.zeros(case.q.shape[:3], device=device)
    together = nvfp4_attention_qat_backward(q, q, k, k, q, lse)
    apart = nvfp4_attention_qat_backward(q.clone(), q, k.clone(), k, q.clone(), lse)
    assert_grads(together, apart)


# The life of a plan


def test_plan_before_and_after_check_support(problem):
    plan = problem.plan()
    assert plan.backend == "auto"
    assert (plan.selected_backend, plan.selected_head_chunk, plan.fallback_reason) == (None, 0, None)
    assert plan.check_support() is True and plan.check_support() is True
    assert (plan.selected_backend, plan.selected_head_chunk, plan.fallback_reason) == ("attn_qat", 2, None)
    assert problem.plan(backend=plan.selected_backend).check_support()
    assert plan.softmax_scale == pytest.approx(128**-0.5)


def test_execute_before_compile(problem, device):
    plan = problem.plan()
    grads = problem.grads()
    arguments = {**problem.inputs, **grads, "workspace": workspace_for(plan, device)}
    with pytest.raises(RuntimeError, match="not compiled"):
        plan.execute(**arguments)
    assert all(grad.isnan().all() for grad in grads.values())


@pytest.mark.parametrize("start", ["execute", "__call__"])
def test_plan_computes_what_the_call_does(start, problem, device):
    """Calling a plan compiles it first; either way the arguments and their order are execute's."""
    plan, grads = problem.plan(), problem.grads()
    workspace = workspace_for(plan, device)
    if start == "execute":
        plan.compile()
    result = getattr(plan, start)(*problem.inputs.values(), *grads.values(), workspace)
    assert result is None
    assert_grads(grads.values(), problem.want())


def test_plan_serves_new_values(runtime, problem, device):
    """The samples' values are not part of the plan, nor what an earlier execute left in the workspace."""
    plan, arguments = runtime
    other = Problem(shape(), device, seed=1)
    arguments["workspace"].fill_(255)
    plan.execute(**{**arguments, **other.inputs})
    assert_grads([arguments[key] for key in KEYS], other.want())


def test_softmax_scale_of_one_execute(runtime, problem):
    plan, arguments = runtime
    for scale, want in ((0.3, problem.call(softmax_scale=0.3)), (None, problem.call())):
        plan.execute(**arguments, softmax_scale=scale)
        assert_grads([arguments[key] for key in KEYS], want)


def test_plan_keeps_no_sample_alive(device):
    problem = Problem(shape(), device)
    samples = [weakref.ref(x) for x in problem.inputs.values()]
    plan = problem.plan()
    plan.compile()
    del problem
    assert [sample() for sample in samples] == [None] * 6


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_copied_plan_executes(copied, runtime, problem):
    plan, arguments = runtime
    copied(plan).execute(**arguments)
    assert_grads([arguments[key] for key in KEYS], problem.want())


@pytest.mark.parametrize("head_chunk", [0, 1])
def test_execute_runs_kernels_and_views_only(head_chunk, problem):
    """Nothing is allocated, copied, filled or cast."""
    plan, arguments = compiled(problem, head_chunk=head_chunk)
    with Recorder() as recorder:
        plan.execute(**arguments)
    views = {torch.ops.aten.slice.Tensor, torch.ops.aten.alias.default}
    assert set(recorder.seen) - views == {BACKWARD_OUT}


def test_execute_allocates_no_gpu_memory_and_does_not_wait(runtime, device):
    if device.type != "cuda":
        pytest.skip("needs pytest --device cuda")
    plan, arguments = runtime
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan.execute(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == before


@pytest.mark.parametrize("form", ["call", "execute"])
def test_compiled_code_steps_out(form, runtime, problem):
    """torch.compile breaks its graph there; with fullgraph the error names what can be traced."""
    plan, arguments = runtime

    def twice(do):
        if form == "call":
            return problem.call()["dv_tensor"] * 2
        plan.execute(**{**arguments, "do_tensor": do})
        return arguments["dv_tensor"] * 2

    torch.compiler.reset()
    assert_same_bits(torch.compile(twice, backend="eager")(problem.case.grad_out), problem.want()[2] * 2)
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="attn_qat.backward is, with recipe 'cudnn'"):
        torch.compile(twice, backend="eager", fullgraph=True)(problem.case.grad_out)


# Options


@pytest.mark.parametrize(
    "batch, head_chunk, launches", [(2, 0, 1), (2, 4, 1), (1, 2, 2), (1, 1, 4), (2, 2, 4)]
)
def test_head_chunk_sets_the_launches_and_not_the_bits(batch, head_chunk, launches, device):
    problem = Problem(shape(batch, heads=4), device)
    plan = problem.plan(head_chunk=head_chunk)
    assert plan.scratch_workspace_bytes() == problem.plan().scratch_workspace_bytes()
    assert plan.selected_head_chunk == (head_chunk or 4)
    with Recorder() as recorder:
        got = problem.call(head_chunk=head_chunk)
    assert recorder.seen.count(BACKWARD_OUT) == launches
    assert_grads(got, problem.want())


def test_workspace_limit(problem):
    required = problem.plan().scratch_workspace_bytes()
    for enough in (None, required, required + 1):
        assert problem.plan(workspace_limit_bytes=enough).scratch_workspace_bytes() == required
        assert_grads(problem.call(workspace_limit_bytes=enough), problem.want())
    for short in (required - 1, 0):
        with pytest.raises(NotImplementedError, match=f"workspace_limit_bytes is {short}, .* {required}"):
            problem.call(workspace_limit_bytes=short)


@pytest.mark.parametrize("backend", ["auto", "attn_qat"])
def test_backend_that_is_here(backend, problem):
    assert_grads(problem.call(backend=backend), problem.want())


# The package, the page and the example


def run(code: str) -> None:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_imported_when_named():
    run(
        "import sys, attn_qat\n"
        "assert 'attn_qat.cudnn' not in sys.modules\n"
        "assert attn_qat.cudnn.nvfp4_attention_qat_backward\n"
        "assert 'attn_qat.cudnn' in sys.modules\n"
    )
    with pytest.raises(AttributeError, match="no attribute 'cudn'"):
        attn_qat.cudn  # noqa: B018


def test_code_of_the_page():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/cudnn.md").read_text(), re.DOTALL)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, "docs/cudnn.md", "exec"), names)


def test_example(capsys):
    runpy.run_path(str(ROOT / "examples/cudnn_backward.py"), run_name="__main__")
    errors = [float(x) for x in re.findall(r"relative error (\S+)", capsys.readouterr().out)]
    assert len(errors) == 3 and all(error < 6e-3 for error in errors)
