"""The operators as citizens of PyTorch: opcheck, compile, checkpoint, export, autocast, modes, copies."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from cases import DTYPES, RECIPES, Shape, as_bshd, make_case
from contract import assert_same_bits
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import attn_qat

OPS = torch.ops.attn_qat
SHAPE = Shape(2, 4, 2, 17, 40, 64)
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def leaves(case):
    return [x.detach().clone().requires_grad_() for x in (case.q, case.k, case.v)]


def step(function, case, inputs=None):
    """Output and input gradients of function(q, k, v) for the case's grad_out."""
    inputs = inputs or leaves(case)
    out = function(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, case.grad_out)


def assert_all_same(got, want):
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(x, y, str(i))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


# --- opcheck ------------------------------------------------------------------------------------------------

LAYOUTS = {"contiguous": "", "transposed": "dqkv", "only v transposed": "v"}  # d is grad_out
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


def laid_out(case, layout):
    inputs = zip("qkvd", (case.q, case.k, case.v, case.grad_out))
    views = [as_bshd(x) if name in layout else x for name, x in inputs]
    return type(case)(*views, case.softmax_scale, case.is_causal)


@each_recipe
@each_layout
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
def test_opcheck_forward(grad, layout, recipe, device):
    case = laid_out(make_case(SHAPE, device), layout)
    args = case.forward_args(recipe)
    args = *(x.requires_grad_(grad) for x in args[:3]), *args[3:]
    torch.library.opcheck(OPS.forward, args)


@each_recipe
@each_layout
def test_opcheck_backward(layout, recipe, device):
    case = laid_out(make_case(SHAPE, device), layout)
    saved = case.forward(recipe)
    torch.library.opcheck(OPS.preprocess, (saved[1], case.grad_out))
    torch.library.opcheck(OPS.backward.default, case.backward_args(recipe, saved))
    torch.library.opcheck(OPS.backward.default, case.backward_args(recipe, saved)[:-1])
    torch.library.opcheck(OPS.backward_dq, case.half_args(recipe, saved))
    torch.library.opcheck(OPS.backward_dkdv, case.half_args(recipe, saved))


@each_layout
def test_opcheck_backward_out(layout, device):
    case = laid_out(make_case(SHAPE, device), layout)
    size = OPS.backward_workspace_bytes(case.q, case.k)
    workspace = torch.zeros(size, dtype=torch.uint8, device=device)
    grads = {f"d{n}": torch.zeros_like(x) for n, x in zip("qkv", (case.q, case.k, case.v))}
    args = *case.backward_args("fp4", case.forward("fp4")), workspace
    torch.library.opcheck(OPS.backward.out, args, grads)


# test_schema compares arguments before and after, which torch cannot for float8; test_cases.py does.
WITHOUT_SCHEMA_TEST = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", [-1, -2])
@each_layout
def test_opcheck_quantize(layout, axis, dtype, device):
    x = laid_out(make_case(Shape(2, 2, 2, 1, 40, 64), device, dtype), layout).v
    scale = torch.tensor([0.5], device=device)
    torch.library.opcheck(OPS.fake_quantize, (x, axis))
    torch.library.opcheck(OPS.fake_quantize, (x.requires_grad_(), axis, scale))
    x = x.detach()
    for tiled in False, True:
        torch.library.opcheck(OPS.quantize, (x, axis, scale, tiled))
        data, scales = OPS.quantize(x, axis, scale, tiled)
        torch.library.opcheck(
            OPS.dequantize, (data, scales, dtype, axis, scale, tiled), test_utils=WITHOUT_SCHEMA_TEST
        )


# --- compile ------------------------------------------------------------------------------------------------


@each_recipe
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_compiled_is_eager(causal, backend, recipe, device):
    """One graph, forward and backward, with the bits of eager."""
    case = make_case(Shape(2, 4, 2, 17, 40, 64, causal), device)
    function = partial(attn_qat.attention, is_causal=causal, recipe=recipe)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    assert_all_same(step(compiled, case), step(function, case))


@each_recipe
def test_dynamic_lengths_compile_once(recipe, device):
    """S = 17, 40, 100, 333 share one compilation; S = 1 may add one."""
    counter = CompileCounterWithBackend("aot_eager")
    function = partial(attn_qat.attention, is_causal=True, recipe=recipe)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for length in (17, 40, 100, 333):
        case = make_case(Shape(1, 2, 1, length, length, 64), device)
        assert_all_same(step(compiled, case), step(function, case))
    assert counter.frame_count == 1
    case = make_case(Shape(1, 2, 1, 1, 1, 64), device)
    assert_all_same(step(compiled, case), step(function, case))
    assert counter.frame_count <= 2


def test_automatic_dynamic_lengths(device):
    """Without dynamic=True the second length makes the graph dynamic, and no later one compiles again."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attn_qat.attention, fullgraph=True, backend=counter)
    for length in (17, 40, 100, 333, 64, 128):
        case = make_case(Shape(1, 2, 1, length, length, 64), device)
        assert_all_same(step(compiled, case), step(attn_qat.attention, case))
    assert counter.frame_count <= 2


def test_changing_the_scale(device):
    """Each scale gives its own answer. torch specialises float arguments: one graph a scale, then reused."""
    counter = CompileCounterWithBackend("aot_eager")
    case = make_case(SHAPE, device)
    function = lambda q, k, v, scale: attn_qat.attention(q, k, v, softmax_scale=scale)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for scale in (0.1, 0.2, 0.3, 0.1, 0.2, 0.3):
        with_scale = lambda f: step(lambda *x: f(*x, scale), case)  # noqa: E731, B023
        assert_all_same(with_scale(compiled), with_scale(function))
    assert counter.frame_count <= 4


@each_recipe
def test_backward_called_in_a_graph(recipe, device):
    """torch.ops.attn_qat.backward and its halves as ordinary calls, with arithmetic around them."""

    def graph(case):
        saved = OPS.forward(*case.forward_args(recipe))
        dq, dk, dv = OPS.backward(*case.backward_args(recipe, saved))
        half = OPS.backward_dq(*case.half_args(recipe, saved))
        return dq * 2, dk + 1, dv.float().sum(), half, *OPS.backward_dkdv(*case.half_args(recipe, saved))

    case = make_case(SHAPE, device)
    compiled = torch.compile(graph, fullgraph=True, backend="aot_eager")
    assert_all_same(compiled(case), graph(case))


def test_out_variant_in_a_graph(device):
    """It writes into its arguments also where the compiler has made everything functional."""
    case = make_case(SHAPE, device)
    args = case.backward_args("fp4", case.forward("fp4"))
    size = OPS.backward_workspace_bytes(case.q, case.k)

    def graph(*args):
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        grads = [torch.empty_like(x) for x in args[1:4]]
        OPS.backward.out(*args, workspace, dq=grads[0], dk=grads[1], dv=grads[2])
        return [x + 1 for x in grads]

    compiled = torch.compile(graph, fullgraph=True, backend="aot_eager")
    assert_all_same(compiled(*args), [x + 1 for x in case.backward("fp4")])


@pytest.mark.parametrize("axis", [-1, -2])
def test_quantisation_in_a_graph(axis, device):
    def graph(x):
        data, scales = attn_qat.quantize(x * 2, axis)
        return attn_qat.fake_quantize(x, axis) + 1, attn_qat.dequantize(data, scales, x.dtype, axis)

    compiled = torch.compile(graph, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (16, 40, 100):
        x = make_case(Shape(1, 2, 2, rows, 1, 64), device).q
        assert_all_same(compiled(x), graph(x))


# --- checkpointing, export, autocast, modes -----------------------------------------------------------------


class CountCalls(TorchDispatchMode):
    """How often an operator runs."""

    def __init__(self, op):
        super().__init__()
        self.op, self.count = op, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is self.op
        return func(*args, **(kwargs or {}))


def save_forward(ctx, op, *args, **kwargs):
    policy = torch.utils.checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if op is OPS.forward.default else policy.PREFER_RECOMPUTE


CONTEXTS = {
    "recompute": (2, {}),
    "save": (1, {"context_fn": partial(create_selective_checkpoint_contexts, [OPS.forward.default])}),
    "save by policy": (1, {"context_fn": partial(create_selective_checkpoint_contexts, save_forward)}),
}


@each_recipe
@pytest.mark.parametrize("runs, options", CONTEXTS.values(), ids=CONTEXTS.keys())
def test_checkpoint(runs, options, recipe, device):
    """Same bits; the forward runs twice, or once where a policy saves it by its name."""
    case = make_case(SHAPE, device)
    block = lambda q, k, v: attn_qat.attention(q * 2, k, v, recipe=recipe) * 3  # noqa: E731
    want = step(block, case)
    with CountCalls(OPS.forward.default) as calls:
        got = step(lambda *x: checkpoint(block, *x, use_reentrant=False, **options), case)
    assert_all_same(got, want)
    assert calls.count == runs


@each_recipe
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_export(causal, recipe, device):
    """Exported with a dynamic length, then run at another one; softmax_scale=None too."""
    module = attn_qat.Attention(is_causal=causal, recipe=recipe)
    example = make_case(Shape(1, 2, 1, 24, 24, 64), device)
    length = torch.export.Dim("length", min=2, max=512)
    program = torch.export.export(
        module, (example.q, example.k, example.v), dynamic_shapes=[{2: length}] * 3, strict=False
    )
    assert any(node.target is OPS.forward.default for node in program.graph.nodes)
    case = make_case(Shape(1, 2, 1, 77, 77, 64), device)
    assert_same_bits(program.module()(case.q, case.k, case.v), module(case.q, case.k, case.v))


@each_recipe
def test_autocast(recipe, device):
    """q and k in FP32 (norms return it) and v in BF16: computed in BF16, gradients in the leaves' dtypes."""
    case = make_case(SHAPE, device)
    mixed = [
        case.q.float().requires_grad_(),
        case.k.float().requires_grad_(),
        case.v.clone().requires_grad_(),
    ]
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = attn_qat.attention(*mixed, recipe=recipe)
    assert out.dtype == torch.bfloat16
    out.backward(case.grad_out)  # outside the context
    assert [x.grad.dtype for x in mixed] == [torch.float32, torch.float32, torch.bfloat16]
    want_out, *want = step(partial(attn_qat.attention, recipe=recipe), case)
    assert_same_bits(out, want_out)
    for x, grad in zip(mixed, want):
        assert_same_bits(x.grad.to(torch.bfloat16), grad)


@pytest.mark.parametrize("call", [attn_qat.attention, attn_qat.infer], ids=["attention", "infer"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool, torch.float8_e4m3fn], ids=str)
def test_autocast_casts_no_other_dtype(dtype, call, device):
    q, k, v = (x.to(dtype) for x in (lambda c: (c.q, c.k, c.v))(make_case(SHAPE, device)))
    with (
        torch.autocast(device.type, dtype=torch.bfloat16),
        pytest.raises(ValueError, match="q has dtype .*, takes bfloat16, float16 or float32"),
    ):
        call(q, k, v)


def test_mixed_dtypes_outside_autocast(device):
    case = make_case(SHAPE, device)
    with pytest.raises(ValueError, match="v has dtype bfloat16, takes float32"):
        attn_qat.attention(case.q.float(), case.k.float(), case.v)


@each_recipe
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode, recipe, device):
    """Same bits, and nothing is kept for a backward."""
    case = make_case(SHAPE, device)
    inputs = leaves(case)
    want = attn_qat.attention(*inputs, recipe=recipe)
    kept = []
    with mode(), torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x):
        out = attn_qat.attention(*inputs, recipe=recipe)
    assert not out.requires_grad and not kept
    assert_same_bits(out, want)


@each_recipe
def test_func_grad(recipe, device):
    """torch.func.grad gives the gradients of backward(), or torch says that custom operators have none."""
    case = make_case(SHAPE, device)
    loss = lambda q, k, v: (attn_qat.attention(q, k, v, recipe=recipe) * case.grad_out).sum()  # noqa: E731
    try:
        got = torch.func.grad(loss, argnums=(0, 1, 2))(case.q, case.k, case.v)
    except RuntimeError as error:
        assert "functorch transforms" in str(error)
    else:
        assert_all_same(got, step(partial(attn_qat.attention, recipe=recipe), case)[1:])


@each_recipe
def test_vmap(recipe, device):
    """Like a loop over the mapped dimension."""
    cases = [make_case(SHAPE, device, seed=seed) for seed in range(3)]
    stacked = [torch.stack(x) for x in zip(*((c.q, c.k, c.v) for c in cases))]
    got = torch.func.vmap(partial(attn_qat.attention, recipe=recipe))(*stacked)
    for out, case in zip(got, cases):
        assert_same_bits(out, case.forward(recipe)[0])


@each_recipe
def test_meta_tensors(recipe, device):
    """Shapes, dtypes and strides of the real results, no numbers."""
    case = laid_out(make_case(SHAPE, device), "dqkv")
    meta = case.map(lambda x: x.to("meta"))
    real, shapes = case.forward(recipe), meta.forward(recipe)
    real, shapes = (*real, *case.backward(recipe, real)), (*shapes, *meta.backward(recipe, shapes))
    for x, y in zip(real, shapes, strict=True):
        assert y.is_meta and (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


@each_recipe
def test_double_backward_is_refused(recipe, device):
    """The formulas are for one differentiation; a second one must not return zeros."""
    case = make_case(SHAPE, device)
    inputs = leaves(case)
    out = attn_qat.attention(*inputs, recipe=recipe)
    (dq,) = torch.autograd.grad(out, inputs[0], case.grad_out.requires_grad_(), create_graph=True)
    with pytest.raises(NotImplementedError, match="attn_qat::backward.*once"):
        torch.autograd.grad(dq.sum(), inputs[1])


# --- modules ------------------------------------------------------------------------------------------------


def save_and_load(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": save_and_load,
}


@each_recipe
@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES.keys())
def test_copies_of_the_module(duplicate, recipe, device):
    """The copy has the options and the bits of the original, also after that has run."""
    case = make_case(SHAPE, device)
    module = attn_qat.Attention(is_causal=True, softmax_scale=0.2, recipe=recipe)
    want = step(module, case)
    assert_all_same(step(duplicate(module), case), want)
    expected = OPS.forward(case.q, case.k, case.v, 0.2, True, recipe)[0]
    assert_same_bits(want[0], expected)


def _run_in_child(module, inputs, queue):
    queue.put(module(*inputs).float().cpu().numpy())


def test_module_in_a_spawned_process(device):
    case = make_case(SHAPE, device)
    module = attn_qat.Attention(is_causal=True, recipe="fp4")
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_run_in_child, args=(module, (case.q, case.k, case.v), queue))
    child.start()
    got = torch.from_numpy(queue.get(timeout=120))
    child.join()
    assert child.exitcode == 0
    assert_same_bits(got, module(case.q, case.k, case.v).float())


def test_module_inside_a_model(device):
    """A layer that uses the module compiles and trains; the module adds no parameter and no state."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(64, 192)
            self.attention = attn_qat.Attention(is_causal=True)

        def forward(self, x):
            q, k, v = (y.unflatten(-1, (4, 16)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
            return self.attention(q, k, v).transpose(1, 2).flatten(-2)

    torch.manual_seed(0)
    layer = Layer().to(device)
    assert set(layer.state_dict()) == {"qkv.weight", "qkv.bias"}
    x = torch.randn(2, 33, 64, device=device)
    want = torch.autograd.grad(layer(x).square().sum(), layer.parameters())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(x).square().sum(), layer.parameters())
    for g, w in zip(got, want):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)
        assert w.abs().max() > 0


def test_recipe_by_name_and_by_member(device):
    case = make_case(SHAPE, device)
    for recipe in attn_qat.Recipe:
        by_member = attn_qat.attention(case.q, case.k, case.v, recipe=recipe)
        assert_same_bits(attn_qat.attention(case.q, case.k, case.v, recipe=recipe.value), by_member)
    assert [r.value for r in attn_qat.Recipe] == list(RECIPES)
    default = attn_qat.attention(case.q, case.k, case.v)
    assert_same_bits(default, attn_qat.attention(case.q, case.k, case.v, recipe="fp4"))


KERNELS = ("fake_quantize", "quantize", "dequantize", "forward", "preprocess", "backward_dq", "backward_dkdv",
           "backward", "backward.out", "backward_workspace_bytes")  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_every_operator_has_a_kernel(name, device):
    """For this device; on a GPU a missing one also marks the tests that need it (conftest.py)."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"attn_qat::{name}", device.type.upper())
