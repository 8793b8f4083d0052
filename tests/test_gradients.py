"""The straight-through gradients: against float64 autograd of the formulas, and what must never vanish."""

import pytest
import torch
from cases import DTYPES, RECIPES, Shape, make_case
from contract import assert_close, assert_same_bits

import attn_qat
from attn_qat import reference

SHAPES = (
    Shape(2, 2, 2, 40, 56, 64),
    Shape(1, 4, 2, 33, 50, 64, causal=True),
    Shape(1, 2, 1, 20, 10, 48, causal=True),
)
NAMES = ("dq", "dk", "dv")
each_recipe = pytest.mark.parametrize("recipe", RECIPES)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def straight_through(x, rounded):
    """The value of `rounded`, the gradient of `x`."""
    return x + (rounded - x).detach()


def autograd_gradients(case, recipe):
    """d(out . grad_out) in float64 by torch autograd: quantisation straight through, dS rounded to BF16."""
    leaves = [x.double().cpu().requires_grad_() for x in (case.q, case.k, case.v)]
    operands = reference.quantize_operands(case.q.cpu(), case.k.cpu(), case.v.cpu(), recipe)
    qh, kh, vh = (straight_through(x, h.double()) for x, h in zip(leaves, operands))
    groups = qh.shape[1] // kh.shape[1]
    kh, vh = kh.repeat_interleave(groups, dim=1), vh.repeat_interleave(groups, dim=1)
    s = case.softmax_scale * (qh @ kh.mT)
    s.register_hook(lambda ds: ds.to(torch.bfloat16).double())
    s_q, s_kv = s.shape[-2:]
    seen = torch.ones(s_q, s_kv, dtype=torch.bool).tril(s_kv - s_q if case.is_causal else s_kv)
    p = s.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    p_hat = quantized_p(p.detach(), s.detach(), seen, recipe)
    out = straight_through(p, p_hat) @ vh
    return torch.autograd.grad(out, leaves, case.grad_out.double().cpu())


def quantized_p(p, s, seen, recipe):
    """The backward's P^: of the normalised P (cudnn) or of exp2(t - E) 2^11, E the ceiling of max t (fp4)."""
    if recipe == "fp4_qk":
        return p
    if recipe == "cudnn":
        return reference.fake_quantize(p.float()).double()
    t = (s * reference.LOG2E).masked_fill(~seen, -torch.inf)
    exponent = t.float().amax(-1, keepdim=True).ceil()
    relative = (t.float() - exponent).exp2().nan_to_num(0.0)
    weight = (t - exponent).exp2().nan_to_num(0.0).sum(-1, keepdim=True).clamp(min=1e-30)
    return reference.fake_quantize(relative * 2048).double() / 2048 / weight


@each_recipe
@each_shape
def test_reference_is_the_autograd_of_its_forward(shape, recipe):
    """float64 against float64. A few of the values of dS round the other way."""
    case = make_case(shape, dtype=torch.float32)
    saved = case.reference_forward(recipe)
    for name, got, want in zip(
        NAMES, case.reference_backward(recipe, saved), autograd_gradients(case, recipe)
    ):
        assert_close(got, want, 1e-4, name)


@each_recipe
@each_shape
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_is_the_autograd_of_its_forward(dtype, shape, recipe, device):
    case = make_case(shape, device, dtype)
    leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
    out = attn_qat.attention(*leaves, is_causal=case.is_causal, recipe=recipe)
    grads = torch.autograd.grad(out, leaves, case.grad_out)
    for name, got, want in zip(NAMES, grads, autograd_gradients(case, recipe)):
        assert_close(got, want, name=name)


@each_recipe
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_gives_the_operators_bits(dtype, recipe, device):
    """The leaves' gradients are backward's, through both the function and torch.ops.attn_qat.forward."""
    case = make_case(Shape(2, 4, 2, 33, 50, 64, causal=True), device, dtype)
    saved = case.forward(recipe)
    want = case.backward(recipe, saved)
    for function in (
        lambda q, k, v: attn_qat.attention(q, k, v, is_causal=True, recipe=recipe),
        lambda q, k, v: torch.ops.attn_qat.forward(q, k, v, case.softmax_scale, True, recipe)[0],
    ):
        leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
        out = function(*leaves)
        assert_same_bits(out, saved[0])
        out.backward(case.grad_out)
        for x, bits in zip(leaves, want):
            assert_same_bits(x.grad, bits)


def test_only_out_carries_a_gradient(device):
    case = make_case(Shape(), device)
    out, *others = torch.ops.attn_qat.forward(case.q.requires_grad_(), *case.forward_args("fp4")[1:])
    assert out.requires_grad and not any(x.requires_grad for x in others)


@pytest.mark.parametrize("wanted", range(3), ids=["q", "k", "v"])
def test_one_leaf_at_a_time(wanted, device):
    """A gradient that alone is asked for has the bits that it has among the others."""
    case = make_case(Shape(1, 2, 2, 33, 50, 64), device)
    want = case.backward("fp4")[wanted]
    leaves = [x.clone() for x in (case.q, case.k, case.v)]
    leaves[wanted].requires_grad_()
    attn_qat.attention(*leaves).backward(case.grad_out)
    assert_same_bits(leaves[wanted].grad, want)


@each_recipe
def test_same_tensor_as_q_k_and_v(recipe, device):
    """Gradients of shared inputs add up."""
    case = make_case(Shape(1, 2, 2, 40, 40, 64), device, dtype=torch.float32)
    shared = type(case)(case.q, case.q, case.q, case.grad_out, case.softmax_scale, False)
    want = sum(grad.double() for grad in shared.backward(recipe))
    x = case.q.clone().requires_grad_()
    attn_qat.attention(x, x, x, recipe=recipe).backward(case.grad_out)
    assert_close(x.grad, want, 1e-6)


@each_recipe
def test_delta_comes_from_high_precision_out(recipe, device):
    """With all keys equal dS sums to 0 along a row, and dq is 0; delta from out would give 0.13 and more."""
    case = make_case(Shape(1, 1, 1, 32, 64, 128), device)
    ordinary = case.backward(recipe)[0].double().norm()
    case.k.copy_(case.k[:, :, :1].expand_as(case.k))
    assert case.backward(recipe)[0].double().norm() <= 0.005 * ordinary


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fake_quantize_is_straight_through(dtype, axis, device):
    """Gradient 1 everywhere: zero, saturated and ordinary values alike."""
    x = torch.tensor([[0.0, 1e-6, 1.0, 6.1, 3000.0, -6e4]] * 3, dtype=dtype, device=device).requires_grad_()
    attn_qat.fake_quantize(x, axis).sum().backward()
    assert_same_bits(x.grad, torch.ones_like(x))


@each_recipe
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_no_gradient_is_silently_zero(head_dim, dtype, recipe, device):
    """Every row of every gradient of random inputs holds something."""
    case = make_case(Shape(2, 4, 2, 65, 65, head_dim, causal=False), device, dtype)
    for grad in case.backward(recipe):
        assert bool((grad.float().abs().amax(-1) > 0).all())


def test_packed_values_have_no_gradient(device):
    """Only fake_quantize is straight through."""
    x = torch.ones(2, 32, device=device, requires_grad=True)
    data, scales = attn_qat.quantize(x)
    with pytest.raises(NotImplementedError, match="quantize has no gradient: fake_quantize has one"):
        attn_qat.dequantize(data, scales, torch.float32).sum().backward()


def test_no_gradient_of_a_global_scale(device):
    x, scale = torch.ones(32, device=device), torch.ones(1, device=device, requires_grad=True)
    with pytest.raises(ValueError, match="global_scale requires grad, takes one that does not"):
        attn_qat.fake_quantize(x, global_scale=scale)


CALLS = {
    "attention": attn_qat.attention,
    "infer": attn_qat.infer,
    "fake_quantize": lambda q, k, v: attn_qat.fake_quantize(q),
    "preprocess": lambda q, k, v: attn_qat.preprocess(q, k),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_forward_mode_is_refused(call, device):
    """The operators would drop the tangent; a zero derivative must not come out."""
    q, k, v = torch.randn(3, 1, 2, 16, 64, device=device, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
        torch.func.jvp(lambda x: call(x, k, v), (q,), (torch.ones_like(q),))


def test_autograd_sees_what_backward_out_writes(device):
    """A graph that saved one of the outputs must not use what has been written since."""
    case = make_case(Shape(1, 2, 2, 32, 32, 64), device)
    *backward_args, row_exponent = case.backward_args("fp4", case.forward("fp4"))
    grads = [torch.zeros_like(x) for x in (case.q, case.k, case.v)]
    weight = torch.ones_like(case.q, requires_grad=True)
    y = (grads[0] * weight).sum()
    workspace = torch.empty(
        attn_qat.backward_workspace_bytes(case.q, case.k), dtype=torch.uint8, device=device
    )
    attn_qat.backward_out(*backward_args, row_exponent, workspace, dq=grads[0], dk=grads[1], dv=grads[2])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
