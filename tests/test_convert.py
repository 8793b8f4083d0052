"""`attn_qat.convert`: which attention calls it replaces, which it leaves or refuses and why, and that it
undoes itself."""

import copy
import inspect
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from contract import assert_close, assert_same_bits
from convert_models import (  # noqa: F401  fixtures among them
    ALL,
    RECIPE,
    WIDTH,
    Call,
    Model,
    SelfAttention,
    assert_all_same,
    fake_attention,
    gradients,
    draw_fixture,
    fresh_fixture,
    make_fixture,
    x_fixture,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import attn_qat

# --- Replaced calls -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["fp4", "fp4_qk", "cudnn"])
@pytest.mark.parametrize(
    "options, heads_kv, lengths",
    [
        ({}, 4, (40, 40)),
        ({"is_causal": True}, 4, (40, 40)),
        ({"scale": 0.3}, 4, (24, 40)),
        ({"enable_gqa": True, "is_causal": True}, 2, (40, 40)),
        ({"enable_gqa": True}, 1, (1, 40)),  # a decoding step
        ({"attn_mask": None, "dropout_p": 0.0, "is_causal": False}, 4, (40, 24)),
    ],
    ids=str,
)
def test_a_call_computes_attn_qat_attention(options, heads_kv, lengths, recipe, draw):
    shapes = ((2, 4, lengths[0], 64), (2, heads_kv, lengths[1], 64), (2, heads_kv, lengths[1], 64))
    tensors = [draw(*shape).requires_grad_() for shape in shapes]
    grad_out = draw(*shapes[0])
    call = Call()
    with attn_qat.convert(call, recipe=recipe):
        out = call(*tensors, **options)
    want = attn_qat.attention(
        *tensors, is_causal=options.get("is_causal", False), softmax_scale=options.get("scale"), recipe=recipe
    )
    assert_same_bits(out, want)
    assert_all_same(torch.autograd.grad(out, tensors, grad_out), torch.autograd.grad(want, tensors, grad_out))


def test_a_model_computes_what_patching_torch_would_give(make, x, monkeypatch):
    model = make()
    plain = model(x)
    with attn_qat.convert(model, recipe=RECIPE) as conversion:
        got = gradients(model, x)
    monkeypatch.setattr(F, "scaled_dot_product_attention", fake_attention)
    assert_all_same(got, gradients(model, x))
    assert not torch.equal(got[0], plain)
    assert conversion.replaced == ALL and not conversion.left and not conversion.unseen


def test_autocast_casts_as_it_does_for_torch(device, draw):
    model, x = Model().to(device), draw(2, 40, WIDTH).float()
    with attn_qat.convert(model, recipe=RECIPE), torch.autocast(device.type, torch.bfloat16):
        assert model.blocks[0].attn1(x).dtype == torch.bfloat16
        assert torch.isfinite(model(x)).all()


# --- Choosing modules ---------------------------------------------------------------------------------------

CHOICES = {
    "default": ({}, ALL),
    "name": ({"modules": "blocks.1.attn1"}, ["blocks.1.attn1"]),
    "names": ({"modules": ["blocks.1.attn1", "blocks.0.attn2"]}, ["blocks.0.attn2", "blocks.1.attn1"]),
    "container": ({"modules": "blocks.1"}, ["blocks.1.attn1", "blocks.1.attn2"]),
    "pattern": ({"modules": "*.attn1"}, ["blocks.0.attn1", "blocks.1.attn1"]),
    "predicate": ({"modules": lambda name, module: isinstance(module, SelfAttention)}, ALL),
    "predicate on the module": (
        {"modules": lambda name, module: getattr(module, "causal", False)},
        ["blocks.0.attn1", "blocks.1.attn1"],
    ),
    "exclude": ({"exclude": "*.attn2"}, ["blocks.0.attn1", "blocks.1.attn1"]),
    "exclude container": ({"exclude": "blocks.0"}, ["blocks.1.attn1", "blocks.1.attn2"]),
    "modules and exclude": ({"modules": "blocks.0", "exclude": ["*.attn1"]}, ["blocks.0.attn2"]),
}


def eager_and_some_compiled(cases, compiled):
    """One parameter set a case in eager mode, and one more for those named in `compiled`."""
    eager = [pytest.param(*values, False, id=name) for name, values in cases.items()]
    return eager + [pytest.param(*cases[name], True, id=f"{name}, compiled") for name in compiled]


@pytest.mark.parametrize(
    "choice, replaced, compiled",
    eager_and_some_compiled(CHOICES, ["default", "names", "exclude", "modules and exclude"]),
)
def test_chosen_modules_and_no_others(choice, replaced, compiled, make, x, monkeypatch):
    model = make()
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    with attn_qat.convert(model, recipe=RECIPE, **choice) as conversion:
        got = run(x)
    assert conversion.replaced == replaced
    for name in replaced:  # the same by hand
        module = model.get_submodule(name)

        def forward(x, module=module):
            with monkeypatch.context() as patch:
                patch.setattr(F, "scaled_dot_product_attention", fake_attention)
                return SelfAttention.forward(module, x)

        module.forward = forward
    assert_close(got, model(x), 1e-2) if compiled else assert_same_bits(got, model(x))


class Tied(nn.Module):
    """One attention layer under two names."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.ModuleList([SelfAttention()]), nn.ModuleList()
        self.decoder.append(self.encoder[0])

    def forward(self, x):
        return self.decoder[0](self.encoder[0](x))


def test_a_module_with_two_names(make, x):
    tied = make(Tied)
    for modules, name in ("encoder", "encoder.0"), ("decoder", "decoder.0"), (None, "encoder.0"):
        with attn_qat.convert(tied, recipe=RECIPE, modules=modules) as conversion:
            tied(x)
        assert conversion.replaced == [name]
    same = "'encoder.0' is the same module as 'decoder.0', which exclude names, takes one choice"
    with pytest.raises(ValueError, match=same):
        attn_qat.convert(tied, exclude="decoder")


def test_the_report_says_how_many_which_and_why(make, x):
    model = make()
    with attn_qat.convert(model, recipe=RECIPE, modules=["blocks.0.attn1", "blocks.1"]) as conversion:
        assert conversion.modules == conversion.unseen == ["blocks.0.attn1", "blocks.1"]
        model.blocks[0](x)
        assert conversion.unseen == ["blocks.1"]
        assert str(conversion).splitlines() == [
            "attn_qat.convert: recipe fp4_qk, attention replaced in 1 modules",
            "  'blocks.0.attn1': replaced",
            "  'blocks.1': no attention call seen",
        ]


# --- Calls that are not taken -------------------------------------------------------------------------------


def _qkv(draw, *, q=(2, 4, 16, 64), k=(2, 4, 16, 64), v=None):
    return draw(*q), draw(*k), draw(*(v or k))


REFUSED = {
    "mask": (lambda d: _qkv(d), {"attn_mask": True}, "attn_mask is given"),
    "dropout": (lambda d: _qkv(d), {"dropout_p": 1e-9}, "dropout_p is 1e-09, takes 0"),
    "causal, fewer queries": (
        lambda d: _qkv(d, q=(2, 4, 8, 64)),
        {"is_causal": True},
        "is_causal with 8 queries and 16 keys.*top-left",
    ),
    "causal, more queries": (
        lambda d: _qkv(d, q=(2, 4, 24, 64)),
        {"is_causal": True},
        "is_causal with 24 queries",
    ),
    "causal, one query": (
        lambda d: _qkv(d, q=(2, 4, 1, 64)),
        {"is_causal": True},
        "is_causal with 1 queries",
    ),
    "three dimensions": (
        lambda d: _qkv(d, q=(2, 16, 64), k=(2, 16, 64)),
        {},
        "query has 3 dimensions, takes 4",
    ),
    "float64": (lambda d: [x.double() for x in _qkv(d)], {}, "query has dtype torch.float64"),
    "head_dim": (
        lambda d: _qkv(d, q=(2, 4, 16, 24), k=(2, 4, 16, 24)),
        {},
        "query has head_dim 24, takes a multiple",
    ),
    "head_dim of value": (
        lambda d: _qkv(d, v=(2, 4, 16, 32)),
        {},
        r"value has shape \(2, 4, 16, 32\), takes",
    ),
    "heads broadcast": (
        lambda d: _qkv(d, k=(2, 1, 16, 64)),
        {},
        "key has 1 heads and query 4, takes enable_gqa=True",
    ),
    "batch broadcast": (
        lambda d: _qkv(d, k=(1, 4, 16, 64)),
        {},
        r"key has shape \(1, 4, 16, 64\), takes \(2,",
    ),
    "strides": (
        lambda d: [x.mT.contiguous().mT for x in _qkv(d)],
        {},
        "query has strides 4096, 1024, 1, 16, takes contig",
    ),
    "address": (
        lambda d: [d(2 * 4 * 16 * 64 + 1)[1:].view(2, 4, 16, 64), *_qkv(d)[1:]],
        {},
        "query starts at an address that is no multiple of 16 bytes",
    ),
    "scale": (lambda d: _qkv(d), {"scale": -0.5}, "scale is -0.5, takes a finite positive number"),
    "no kv heads": (
        lambda d: _qkv(d, k=(2, 0, 16, 64)),
        {"enable_gqa": True},
        "key has 0 heads, takes a number that divides query's 4",
    ),
}
each_refused = pytest.mark.parametrize("tensors, options, reason", REFUSED.values(), ids=REFUSED.keys())


def _options(options, device):
    if options.get("attn_mask"):
        return {**options, "attn_mask": torch.ones(16, 16, dtype=torch.bool, device=device).tril()}
    return options


@each_refused
def test_a_call_not_taken_raises_with_module_and_reason(tensors, options, reason, draw, device):
    model = nn.Sequential(Call())
    with attn_qat.convert(model), pytest.raises(ValueError, match=rf"^attn_qat.convert: '0': .*{reason}"):
        model[0](*tensors(draw), **_options(options, device))


@pytest.mark.parametrize(
    "tensors, options, reason, compiled",
    eager_and_some_compiled(
        REFUSED, ["mask", "dropout", "causal, fewer queries", "float64", "heads broadcast"]
    ),
)
def test_or_is_left_as_it_is_and_reported(tensors, options, reason, compiled, draw, device):
    if tensors is REFUSED["no kv heads"][0] and torch.__version__ < (2, 13):
        pytest.skip("scaled_dot_product_attention without kv heads ends the process (SIGFPE) in this torch")
    tensors, options = tensors(draw), _options(options, device)
    if "dropout_p" in options:
        options = {"dropout_p": 1e-9}  # drops nothing, so that the outputs compare
    model = nn.Sequential(Call())
    run = torch.compile(model[0], backend="aot_eager", fullgraph=True, dynamic=True) if compiled else model[0]
    with attn_qat.convert(model, unsupported="leave") as conversion:
        out = run(*tensors, **options)
    # torch's own CUDA kernels give NaN for a negative scale.
    want = F.scaled_dot_product_attention(*tensors, **options)
    torch.testing.assert_close(out, want, rtol=1e-2, atol=1e-2, equal_nan=True)
    assert list(conversion.left) == ["0"] and conversion.replaced == []
    assert f"'0': left, {conversion.left['0'][0]}" in str(conversion)


def test_nested_tensors_are_refused(draw):
    nested = torch.nested.nested_tensor([draw(8, 4, 64), draw(16, 4, 64)], layout=torch.jagged).transpose(
        1, 2
    )
    call = Call()
    with (
        attn_qat.convert(call),
        pytest.raises(ValueError, match="the model itself: query is a nested tensor"),
    ):
        call(nested, nested, nested)


def test_a_problem_without_a_kernel_on_this_gpu(device, draw):
    """Head dimension 48 has a kernel on the CPU only."""
    q = draw(2, 4, 16, 48)
    call = Call()
    with attn_qat.convert(call, unsupported="leave") as conversion:
        call(q, q, q)
    if device.type == "cpu":
        assert conversion.replaced == [""]
    else:
        assert "no CUDA kernel" in conversion.left[""][0]


# --- Undoing ------------------------------------------------------------------------------------------------


def test_undone_on_exit_exactly(make, x):
    model = make()
    before = [(type(m), dict(m.__dict__)) for m in model.modules()]
    keys, plain = list(model.state_dict()), model(x)
    with attn_qat.convert(model, recipe=RECIPE) as conversion:
        assert list(model.state_dict()) == keys and isinstance(model, Model)
        assert not torch.equal(model(x), plain)
    assert [(type(m), m.__dict__) for m in model.modules()] == before
    assert_same_bits(model(x), plain)
    conversion.undo()  # nothing left to undo


def test_undone_after_an_exception(make):
    model = make()
    with pytest.raises(RuntimeError, match="mine"), attn_qat.convert(model):
        raise RuntimeError("mine")
    assert type(model) is Model


def test_an_exception_within_forward_leaves_no_mode_behind(make, draw):
    model = make()
    with attn_qat.convert(model):
        with pytest.raises(ValueError, match="attn_mask is given"):
            model.blocks[0].attn1(draw(2, 8, WIDTH), attn_mask=draw(8, 8))
        assert torch.overrides._get_current_function_mode() is None


def test_undo_refuses_when_another_class_was_put_on_top(make):
    model = make()
    conversion = attn_qat.convert(model)
    converted, model.blocks[1].attn1.__class__ = type(model.blocks[1].attn1), SelfAttention
    with pytest.raises(RuntimeError, match="'blocks.1.attn1' has got another class or forward"):
        conversion.undo()
    assert type(model) is not Model  # nothing was undone
    model.blocks[1].attn1.__class__ = converted
    conversion.undo()
    assert type(model) is Model


# --- Roles and threads --------------------------------------------------------------------------------------


def test_a_teacher_beside_a_student(make, x):
    teacher = make()
    student = copy.deepcopy(teacher)
    plain = teacher(x)
    with attn_qat.convert(student, recipe=RECIPE):
        assert not torch.equal(student(x), plain)
        assert_same_bits(teacher(x), plain)


def test_threads_do_not_see_each_other(make, x):
    """Two models run, and a third is converted and undone over and over, all at once."""
    teacher = make()
    student, third = copy.deepcopy(teacher), copy.deepcopy(teacher)
    attn_qat.convert(student, recipe=RECIPE)
    want = {"teacher": teacher(x), "student": student(x)}
    failures, start = [], threading.Barrier(3)

    def repeat(work, times):
        try:
            start.wait()
            for _ in range(times):
                work()
        except BaseException as error:
            failures.append(error)

    def convert_and_undo():
        with attn_qat.convert(third, recipe=RECIPE):
            assert_same_bits(third(x), want["student"])
        assert_same_bits(third(x), want["teacher"])

    work = [
        (lambda: assert_same_bits(teacher(x), want["teacher"]), 12),
        (lambda: assert_same_bits(student(x), want["student"]), 12),
        (convert_and_undo, 6),
    ]
    threads = [threading.Thread(target=repeat, args=w) for w in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_copies_are_converted_and_stand_alone(duplicate, make, x):
    model = make()
    conversion = attn_qat.convert(model, recipe=RECIPE, exclude="*.attn2")
    want = model(x)
    twin = duplicate(model)
    conversion.undo()
    assert_same_bits(twin(x), want)
    with torch.no_grad():
        model.blocks[0].attn1.out.weight.zero_()
    assert_same_bits(twin(x), want)


def test_a_copy_with_its_conversion_is_undone_by_itself(make, x):
    model = make(Model)
    plain = model(x)
    with attn_qat.convert(model, recipe=RECIPE) as conversion:
        converted = model(x)
        copied, copied_conversion = copy.deepcopy((model, conversion))
        copied_conversion.undo()
        assert_same_bits(copied(x), plain)
        assert_same_bits(model(x), converted)
    with attn_qat.convert(copied, recipe=RECIPE):
        assert_same_bits(copied(x), converted)


def test_the_signature_of_forward_stays(make):
    block = SelfAttention()
    before = inspect.signature(block.forward)
    with attn_qat.convert(block):
        assert inspect.signature(block.forward) == before


# --- torch.compile and checkpointing ------------------------------------------------------------------------


def test_compiled_in_one_graph_with_gradients(make, x):
    model = make()
    with attn_qat.convert(model, recipe=RECIPE):
        want = gradients(model, x)
        got = gradients(torch.compile(model, backend="aot_eager", fullgraph=True), x)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_close(a, b, 3e-2, str(i))  # fused arithmetic rounds otherwise, and FP4 codes follow


def test_a_model_compiled_before_follows_conversion_and_undoing(make, x):
    model = make()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    plain = compiled(x)
    with attn_qat.convert(model, recipe=RECIPE):
        want = model(x)
        assert_close(compiled(x), want, 1e-2)
        compiled(x)
        assert counter.frame_count == 2
    assert_same_bits(compiled(x), plain)
    with attn_qat.convert(compiled, recipe=RECIPE) as conversion:  # the wrapper does for the model
        assert conversion.modules == [""]
        assert_close(compiled(x), want, 1e-2)
        assert counter.frame_count == 2  # and what was compiled for the first conversion serves the second
    with attn_qat.convert(model, recipe="fp4"):  # but not another recipe
        other = model(x)
        assert_close(compiled(x), other, 1e-2)
        assert counter.frame_count == 3 and not torch.equal(other, want)


def test_layers_share_compiled_code(make, x):
    """Nothing of a conversion differs from layer to layer in a guard, so that layers compiled one by one
    compile once."""
    model = make()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(lambda block, x: block(x), backend=counter, fullgraph=True)
    with attn_qat.convert(model, recipe=RECIPE):
        want = [block(x) for block in model.blocks]
        got = [run(block, x) for block in model.blocks]
    assert counter.frame_count == 1
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-2)


def test_blocks_compiled_within_an_eager_model(make, x):
    model = make()
    conversion = attn_qat.convert(model, recipe=RECIPE)
    want = model(x)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    assert_close(model(x), want, 1e-2)
    conversion.undo()


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("modules", [None, "blocks"], ids=["model", "blocks"])
def test_recomputation_in_the_backward_is_replaced_too(modules, reentrant, make, x):
    model = make()
    conversion = attn_qat.convert(model, recipe=RECIPE, modules=modules)
    want = gradients(model, x)
    model.reentrant = reentrant
    assert_all_same(gradients(model, x), want)
    if not reentrant:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for a, b in zip(gradients(compiled, x), want, strict=True):
            assert_close(a, b, 3e-2)
    conversion.undo()


# --- Beside torchao -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("modules", ["*.attn1", None], ids=["named", "whole model"])
@pytest.mark.parametrize("first", ["torchao", "attn_qat"])
def test_composes_with_quantised_linears_in_either_order(first, modules, device, draw):
    """torchao's fake quantisation in training, its integers afterwards, and undoing at the end."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    qat = pytest.importorskip("torchao.quantization.qat")
    config = quantization.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=quantization.PerGroup(32)
    )
    model, x = Model().to(device, torch.bfloat16), draw(2, 40, WIDTH)
    if first == "torchao":
        quantization.quantize_(model, qat.QATConfig(config, step="prepare"))
    conversion = attn_qat.convert(model, recipe=RECIPE, modules=modules)
    if first == "attn_qat":
        quantization.quantize_(model, qat.QATConfig(config, step="prepare"))
    assert isinstance(model.blocks[0].attn1.qkv, qat.FakeQuantizedLinear)
    converted = gradients(model, x)
    assert conversion.replaced == [name for name in ALL if modules is None or name.endswith("attn1")]
    assert all(torch.isfinite(grad).all() for grad in converted)
    quantization.quantize_(model, qat.QATConfig(config, step="convert"))
    assert "Int" in type(model.blocks[0].attn1.qkv.weight.data).__name__
    with torch.no_grad():
        out = model(x)
        conversion.undo()
        assert not torch.equal(model(x), out)
    assert_close(out, converted[0], 5e-2)
