"""infer: the bits of forward's out and lse, no training outputs, and a receipt of what a device runs."""

import dataclasses
import re

import pytest
import torch
from cases import DTYPES, KINDS, SHAPES, Shape, as_bshd, make_case
from contract import assert_same_bits
from test_errors import ATTENTION, OPTIONS, Wrong, assert_names
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import attn_qat
from attn_qat import Recipe, inference

OPS = torch.ops.attn_qat
PV_MODES = ("fp4", "bf16")
RECIPES = ("fp4", "fp4_qk")  # of the modes, in their order
each_mode = pytest.mark.parametrize("pv_mode", PV_MODES)
each_recipe = pytest.mark.parametrize("recipe", RECIPES)
CROSS = Shape(2, 4, 2, 70, 100, 64)


def infer(case, pv_mode, **options):
    """attn_qat.infer on the case's q, k, v, mask and scale."""
    options = {"is_causal": case.is_causal, "softmax_scale": case.softmax_scale, **options}
    return attn_qat.infer(case.q, case.k, case.v, pv_mode=pv_mode, **options)


def trained(case, pv_mode):
    """(out, lse) of forward with the recipe that trains for the mode."""
    out, _, lse, _ = case.forward(RECIPES[PV_MODES.index(pv_mode)])
    return out, lse


# --- the numbers --------------------------------------------------------------------------------------------


def check(case, pv_mode):
    out, lse = trained(case, pv_mode)
    alone = infer(case, pv_mode)
    assert alone.is_contiguous()
    assert_same_bits(alone, out)
    for got, want in zip(infer(case, pv_mode, return_lse=True), (out, lse), strict=True):
        assert got.is_contiguous()
        assert_same_bits(got, want)


@each_mode
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_of_forward(shape, pv_mode, device):
    check(make_case(shape, device), pv_mode)


@each_mode
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype, pv_mode, device):
    check(make_case(Shape(1, 2, 1, 150, 150, 128, causal=True), device, dtype), pv_mode)


@each_mode
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_input(kind, pv_mode, device):
    check(make_case(Shape(1, 2, 2, 130, 200, 64), device, kind=kind), pv_mode)


@each_mode
def test_bshd_views(pv_mode, device):
    case = make_case(CROSS, device)
    views = dataclasses.replace(case, q=as_bshd(case.q), k=as_bshd(case.k), v=as_bshd(case.v))
    assert not views.q.is_contiguous()
    assert_same_bits(infer(views, pv_mode), infer(case, pv_mode))


@each_mode
@pytest.mark.parametrize(
    "empty", [{"batch": 0}, {"seq_q": 0}, {"heads_q": 0, "heads_kv": 0}, {"seq_kv": 0}], ids=str
)
def test_empty(empty, pv_mode, device):
    check(make_case(Shape(**{"batch": 2, "seq_q": 5, "seq_kv": 7, **empty}), device), pv_mode)


@each_mode
def test_nan_is_seen(pv_mode, device):
    case = make_case(Shape(1, 1, 1, 20, 20, 64), device)
    case.k[0, 0, 3, 60] = torch.nan
    out, lse = infer(case, pv_mode, return_lse=True)
    assert bool(out.isnan().all() and lse.isnan().all())


def test_the_modes_differ(device):
    case = make_case(CROSS, device)
    assert not torch.equal(infer(case, "fp4"), infer(case, "bf16"))


def test_defaults_are_those_of_attention(device):
    """Trained with the default recipe, inferred in the default mode: the same bits."""
    case = make_case(CROSS, device)
    assert_same_bits(attn_qat.infer(case.q, case.k, case.v), attn_qat.attention(case.q, case.k, case.v))


def test_two_halves_of_the_keys_merge_by_their_lse(device):
    """Where P is not quantised, (o1, lse1) and (o2, lse2) give the whole. What ring attention needs."""
    case = make_case(Shape(1, 2, 2, 64, 128, 64), device, torch.float16)
    whole, whole_lse = infer(case, "bf16", return_lse=True)
    (o1, l1), (o2, l2) = (
        infer(dataclasses.replace(case, k=case.k[:, :, part], v=case.v[:, :, part]), "bf16", return_lse=True)
        for part in (slice(64), slice(64, None))
    )
    lse = torch.logaddexp(l1, l2)
    merged = (l1 - lse).exp()[..., None] * o1 + (l2 - lse).exp()[..., None] * o2
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-5)
    torch.testing.assert_close(merged, whole.float(), rtol=2e-3, atol=2e-3)


# --- PyTorch ------------------------------------------------------------------------------------------------


@each_recipe
@pytest.mark.parametrize("op", [OPS.infer, OPS.infer_with_lse], ids=str)
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
def test_opcheck(grad, op, recipe, device):
    case = make_case(CROSS, device)
    inputs = as_bshd(case.q), case.k, as_bshd(case.v)
    args = *(x.requires_grad_(grad) for x in inputs), *case.options(recipe)
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op, args, test_utils=utils if grad else (*utils, "test_aot_dispatch_dynamic"))


@each_mode
def test_compiles_once_for_all_lengths(pv_mode, device):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attn_qat.infer, fullgraph=True, dynamic=True, backend=counter)
    for length in (17, 40, 100, 333):
        case = make_case(Shape(1, 2, 1, length, length, 64), device)
        options = {"pv_mode": pv_mode, "is_causal": True, "return_lse": True}
        for got, want in zip(compiled(case.q, case.k, case.v, **options), infer(case, **options)):
            assert_same_bits(got, want)
    assert counter.frame_count == 1


def test_export(device):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return attn_qat.infer(q, k, v, is_causal=True)

    case = make_case(Shape(1, 2, 1, 24, 24, 64), device)
    program = torch.export.export(Layer(), (case.q, case.k, case.v), strict=False)
    assert OPS.infer.default in [node.target for node in program.graph.nodes]
    assert_same_bits(program.module()(case.q, case.k, case.v), infer(case, "fp4", is_causal=True))


def test_autocast(device):
    case = make_case(CROSS, device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = attn_qat.infer(case.q.float(), case.k.float(), case.v)
    assert_same_bits(out, infer(case, "fp4"))


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_gradient_is_refused(return_lse, device):
    """Not zero and not silently absent: a training loop that calls infer must stop."""
    case = make_case(CROSS, device)
    case.q.requires_grad_()
    out = infer(case, "fp4", return_lse=return_lse)
    with pytest.raises(NotImplementedError, match="attn_qat.attention"):
        (out[0] if return_lse else out).sum().backward()


def test_meta_tensors(device):
    case = make_case(CROSS, device).map(lambda x: x.to("meta"))
    for got, want in zip(infer(case, "fp4", return_lse=True), trained(case, "fp4")):
        assert got.is_meta and (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())


# --- refusals -----------------------------------------------------------------------------------------------

TRAINING_ONLY = Wrong("recipe", lambda _: "cudnn", "cudnn.*fp4.*fp4_qk")
UNKNOWN = [Wrong("recipe", lambda _, n=n: n, f"'{n}', takes 'fp4' or 'fp4_qk'") for n in ("fp8", "")]
WRONG = [*ATTENTION, *(w for w in OPTIONS if w.argument != "recipe"), *UNKNOWN, TRAINING_ONLY]


def arguments(wrong, device):
    case = make_case(Shape(2, 4, 2, 32, 48, 64), device)
    good = {"q": case.q, "k": case.k, "v": case.v}
    good |= {"softmax_scale": 0.125, "is_causal": False, "recipe": "fp4"}
    return {**good, wrong.argument: wrong.change(good[wrong.argument])}


@pytest.mark.parametrize("op", ["infer", "infer_with_lse"])
@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_refusal(op, wrong, device):
    with pytest.raises(ValueError, match=f"^{op}: ") as refusal:
        getattr(OPS, op)(**arguments(wrong, device))
    assert_names(str(refusal.value), wrong)


@pytest.mark.parametrize("wrong", [w for w in WRONG if w.fake], ids=str)
def test_fake_kernel_refuses_alike(wrong, device):
    with FakeTensorMode() as mode:
        fakes = {
            n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
            for n, x in arguments(wrong, device).items()
        }
        with pytest.raises(ValueError) as refusal:
            OPS.infer(**fakes)
    assert_names(str(refusal.value), wrong)


BAD_MODES = {
    "fp8": NotImplementedError,
    "fp16": ValueError,
    "": ValueError,
    "FP4": ValueError,
    None: ValueError,
}


@pytest.mark.parametrize("pv_mode, error", BAD_MODES.items(), ids=str)
def test_a_mode_without_kernels_is_refused(pv_mode, error, device):
    """Nothing is computed in another mode instead."""
    x = torch.ones(1, 1, 1, 64, device=device)
    for call in (
        lambda: attn_qat.infer(x, x, x, pv_mode=pv_mode),
        lambda: attn_qat.infer_kernel("cpu", pv_mode),
    ):
        with pytest.raises(error, match=f"pv_mode is {pv_mode!r}.*takes 'fp4' or 'bf16'"):
            call()


# --- the receipt --------------------------------------------------------------------------------------------


@each_mode
def test_the_device_of_this_run_has_a_kernel(pv_mode, device):
    receipt = attn_qat.infer_kernel(device, pv_mode)
    assert receipt.available and receipt.op == "attn_qat::infer" and receipt.pv_mode == pv_mode
    assert receipt.recipe == Recipe(RECIPES[PV_MODES.index(pv_mode)])
    assert receipt.device.startswith(device.type) and "\n" not in str(receipt)
    for field in (f"recipe={receipt.recipe}", f"pv_mode={pv_mode}", f"kernel={receipt.kernel}"):
        assert field in str(receipt).split()


def test_the_cpu_receipt():
    receipt = attn_qat.infer_kernel("cpu")
    assert (receipt.kernel, receipt.why_not) == ("cpu", ())
    assert str(receipt) == (
        "op=attn_qat::infer recipe=fp4 qk_mode=nvfp4(per-16-e4m3) pv_mode=fp4 device=cpu arch=cpu kernel=cpu"
    )


ALL = ["sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a"]
BUILDS = {  # families of a build, the portable one first as build_info() may list it
    "portable": {"mma_sync/forward": ALL, "mma_sync/backward_dq": ALL, "common/quantize": ALL},
    "with hopper": {"mma_sync/forward": ALL, "sm90/forward": ["sm_90a"]},
    "cpu only": {},
}
RESOLUTIONS = [  # build, capability, target, kernel, what the reasons say
    ("portable", (9, 0), "sm_90a", "mma_sync", "^$"),
    ("portable", (12, 0), "sm_120a", "mma_sync", "^$"),
    ("portable", (8, 0), "sm_80a", None, "^mma_sync: no code for sm_80a, compiled for sm_90a sm_100a"),
    ("with hopper", (9, 0), "sm_90a", "sm90", "^mma_sync: a more specific family comes first$"),
    ("with hopper", (10, 3), "sm_103a", "mma_sync", "^sm90: no code for sm_103a, compiled for sm_90a$"),
    ("cpu only", (9, 0), "sm_90a", None, "^this build has no CUDA kernels$"),
    ("portable", None, "none", None, "^torch sees no device cuda:0$"),
]


@pytest.mark.parametrize("build, capability, target, kernel, why_not", RESOLUTIONS, ids=str)
def test_resolution_by_device_and_build(build, capability, target, kernel, why_not, monkeypatch):
    monkeypatch.setattr(inference, "build_info", lambda: {"kernels": BUILDS[build]})
    monkeypatch.setattr(inference, "_capability", lambda device: capability)
    receipt = attn_qat.infer_kernel("cuda:0")
    assert (receipt.target, receipt.kernel, receipt.available) == (target, kernel, kernel is not None)
    assert re.search(why_not, "; ".join(receipt.why_not))
    assert f"arch={target} kernel={kernel or 'none'}" in str(receipt)


@pytest.mark.parametrize("name", ["meta", "mps"])
def test_a_device_without_operators(name):
    receipt = attn_qat.infer_kernel(name)
    assert not receipt.available and name in str(receipt)
