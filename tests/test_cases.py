"""Small inputs that broke other attention libraries, each with its right answer.

Elsewhere: the same bits in test_determinism.py, gradients in test_gradients.py, single blocks in test_quantize.py,
compilers in test_ops.py, streams, devices and sizes in test_cuda.py.
"""

import math

import pytest
import torch
from cases import RECIPES, Shape, make_case
from contract import assert_close, assert_lse, assert_same_bits, relative_error
from torch.utils._python_dispatch import TorchDispatchMode
from contract import check_backward, check_forward

import attn_qat
from attn_qat import reference

OPS = torch.ops.attn_qat
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def check(case, recipe):
    check_backward(case, recipe, check_forward(case, recipe))


@each_recipe
@pytest.mark.parametrize("lengths", [(1, 1), (1, 128), (128, 1)], ids=str)
def test_one_token(lengths, recipe, device):
    case = make_case(Shape(1, 1, 1, *lengths, 128), device)
    saved = case.forward(recipe)
    dq, dk, dv = case.backward(recipe, saved)
    assert all(bool(x.isfinite().all()) for x in (*saved, dq, dk, dv))
    if lengths[1] > 1:
        return
    qh, kh, vh = reference.quantize_operands(case.q.cpu(), case.k.cpu(), case.v.cpu(), recipe)
    assert_same_bits(saved[1], vh.expand_as(case.q), "high_precision_out is V^")
    assert_lse(saved[2], case.softmax_scale * (qh.double() @ kh.double().mT).squeeze(-1))
    assert dq.abs().max() <= 1e-4 and dk.abs().max() <= 1e-4
    if recipe == "cudnn":  # fq(1) is 1.03125
        assert_close(dv, 1.03125 * case.grad_out.double().cpu().sum(2, keepdim=True), name="dv")


@each_recipe
def test_equal_scores_of_minus_78200(recipe, device):
    """q = 100 and k = -75 quantise to 96 and -72: a row is a plain mean. No finite number stands for -inf."""
    case = make_case(Shape(1, 2, 2, 20, 48, 128), device)
    case.q.fill_(100), case.k.fill_(-75)
    saved = case.forward(recipe)
    vh = reference.quantize_operands(case.q.cpu(), case.k.cpu(), case.v.cpu(), recipe)[2].double()
    assert_close(saved[1], vh.mean(2, keepdim=True).expand(-1, -1, 20, -1), name="high_precision_out")
    score = 96 * -72 * 128 * case.softmax_scale
    assert (saved[2].double() - (score + math.log(48))).abs().max() <= 0.016  # two FP32 steps at 78200
    dq, dk, dv = case.backward(recipe, saved)
    assert bool(dq.isfinite().all() and dk.isfinite().all())
    want = case.grad_out.double().cpu().sum(2, keepdim=True).expand(-1, -1, 48, -1) / 48
    # P from lse is good to half a per cent here. fq(1/48) is 1.125/48; against 2^E a code is up to 6.25% off.
    factor, bound = {"cudnn": (1.125, 0.01), "fp4": (1.0, 0.07), "fp4_qk": (1.0, 0.01)}[recipe]
    assert_close(dv, factor * want, bound, "dv")


@each_recipe
@pytest.mark.parametrize("value", [133120.0, 3e38])
def test_saturated_inputs(value, recipe, device):
    """Every finite input saturates to 2688 in a quantised operand; nothing overflows to Inf or NaN."""
    case = make_case(Shape(1, 2, 2, 20, 32, 64), device)
    for x in (case.q, case.k, case.v) if recipe != "fp4_qk" else (case.q, case.k):
        x.fill_(value)
    saved = case.forward(recipe)
    assert all(bool(x.isfinite().all()) for x in (*saved, *case.backward(recipe, saved)))
    mean = torch.full_like(case.q, 2688.0) if recipe != "fp4_qk" else case.v.mean(2, True).expand_as(case.q)
    assert_close(saved[1], mean, name="high_precision_out")
    assert_lse(saved[2], torch.full((1, 2, 20), 2688.0**2 * 64 / 8 + math.log(32), dtype=torch.float64))


@each_recipe
@pytest.mark.parametrize("lengths", [(2, 4), (7, 3), (33, 80), (80, 33)], ids=str)
def test_causal_is_bottom_right(lengths, recipe, device):
    """Row i sees keys 0 .. i + S_kv - S_q, in the forward and the backward; fake kernels take it as well."""
    s_q, s_kv = lengths
    case = make_case(Shape(1, 2, 2, s_q, s_kv, 64, causal=True), device)
    _, high_precision_out, lse, _ = saved = case.forward(recipe)
    operands = reference.quantize_operands(case.q.cpu(), case.k.cpu(), case.v.cpu(), recipe)
    qh, kh, vh = (x.double() for x in operands)
    scores = qh @ kh.mT * case.softmax_scale
    for i in range(s_q):
        scores[:, :, i, max(0, i + s_kv - s_q + 1) :] = -torch.inf
    assert_close(high_precision_out, scores.softmax(-1).nan_to_num(0) @ vh)
    assert_lse(lse, scores.logsumexp(-1))
    check(case, recipe)
    meta = case.map(lambda x: x.to("meta"))
    assert [x.shape for x in meta.forward(recipe)] == [x.shape for x in saved]


@each_recipe
def test_grad_out_is_not_contiguous(recipe, device):
    case = make_case(Shape(2, 3, 3, 33, 33, 64, causal=True), device)
    weight = torch.randn(3 * 64, 50, generator=torch.Generator().manual_seed(1)).to(case.q)

    def gradients(loss, contiguous):
        leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
        out = attn_qat.attention(*leaves, is_causal=True, recipe=recipe)
        if contiguous:
            out.register_hook(torch.Tensor.contiguous)
        seen = []
        out.register_hook(lambda g: seen.append(g.is_contiguous()))
        loss(out).backward()
        assert seen == [contiguous]
        return [x.grad for x in leaves]

    for loss in (
        torch.Tensor.sum,
        lambda out: (out.transpose(1, 2).reshape(2, 33, 192) @ weight).square().sum(),
    ):
        for got, want in zip(gradients(loss, False), gradients(loss, True)):
            assert_same_bits(got, want)


@each_recipe
def test_offsets_past_2_31_elements(recipe, device):
    """A small batch seen through a stride of 2^31 elements: the memory between is reserved, never touched."""
    case = make_case(Shape(2, 2, 2, 33, 33, 64), device)
    wanted = *case.forward(recipe), *case.backward(recipe)
    storage = torch.empty(2**31 + case.q[0].numel(), dtype=case.q.dtype, device=device)
    far = storage.as_strided(case.q.shape, (2**31, *case.q.stride()[1:]))
    for position in range(4):  # q, k, v and grad_out in turn
        inputs = [case.q, case.k, case.v, case.grad_out]
        inputs[position] = far.copy_(inputs[position])
        moved = type(case)(*inputs, case.softmax_scale, case.is_causal)
        for got, want in zip((*moved.forward(recipe), *moved.backward(recipe)), wanted):
            assert_same_bits(got, want)
    assert_same_bits(attn_qat.fake_quantize(far), attn_qat.fake_quantize(case.grad_out))


LENGTHS = (1, 15, 16, 17, 31, 33, 63, 65, 127, 129)


class Copies(TorchDispatchMode):
    """Counts them."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_)
        return function(*args, **(kwargs or {}))


def test_grad_out_of_a_layer_is_not_copied(device):
    """Behind transpose and reshape it arrives as (B, S, H, D), which the kernels read."""
    case = make_case(Shape(2, 3, 3, 33, 33, 64), device)
    leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
    out = attn_qat.attention(*leaves)
    with Copies() as copies:
        torch.autograd.grad(
            out.transpose(1, 2).unflatten(1, (1, -1)), leaves, torch.ones(2, 1, 33, 3, 64).to(out)
        )
    assert copies.count == 0


@each_recipe
@pytest.mark.parametrize("compiled", [False, True])
def test_grad_out_is_not_aligned(compiled, recipe, device):
    """A gradient that is a part of another tensor's, three elements from its start."""
    case = make_case(Shape(1, 2, 2, 32, 32, 64), device)
    leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
    before = case.q.new_zeros(3).requires_grad_()

    def loss(q, k, v):
        return torch.cat([before, attn_qat.attention(q, k, v, recipe=recipe).flatten()]).square().sum()

    run = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    run(*leaves).backward()
    out, high_precision_out, lse, row_exponent = case.forward(recipe)
    options = case.softmax_scale, False, recipe, row_exponent
    want = attn_qat.backward(2 * out, case.q, case.k, case.v, high_precision_out, lse, *options)
    for x, grad in zip(leaves, want):
        assert_same_bits(x.grad, grad)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("recipe", ["cudnn", "fp4"])
@pytest.mark.parametrize("s_q", LENGTHS)
def test_tails_in_every_head(s_q, recipe, causal, device):
    for s_kv in LENGTHS:
        check(make_case(Shape(1, 3, 3, s_q, s_kv, 64, causal), device), recipe)


@each_recipe
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_grouped_heads(causal, recipe, device):
    """Query head h reads key/value head h // 4: as the expanded problem does, with its gradients summed."""
    case = make_case(Shape(2, 8, 2, 40, 40, 64, causal), device)
    k, v = (x.repeat_interleave(4, dim=1) for x in (case.k, case.v))
    expanded = type(case)(case.q, k, v, case.grad_out, case.softmax_scale, causal)
    saved, saved_expanded = case.forward(recipe), expanded.forward(recipe)
    for got, want in zip(saved, saved_expanded):
        assert_same_bits(got, want)
    _, *want = expanded.reference_backward(recipe, saved_expanded)
    for got, each_head in zip(case.backward(recipe, saved)[1:], want):
        assert_close(got, each_head.unflatten(1, (2, 4)).sum(2))


@each_recipe
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cancelling_groups(dtype, recipe, device):
    """Heads come in pairs with equal q and opposite grad_out: dK and dV are 0, with no BF16 residue."""
    case = make_case(Shape(1, 4, 1, 33, 50, 64), device, dtype)
    case.q[:, 1], case.q[:, 3] = case.q[:, 0], case.q[:, 2]
    case.grad_out[:, 1], case.grad_out[:, 3] = -case.grad_out[:, 0], -case.grad_out[:, 2]
    _, dk, dv = case.backward(recipe)
    assert dk.abs().max() <= 1e-5 and dv.abs().max() <= 1e-5


@each_recipe
def test_heads_that_do_not_divide(recipe, device):
    case = make_case(Shape(1, 8, 3, 20, 20, 64), device)
    with pytest.raises(ValueError, match="8.*3|3.*8"):
        case.forward(recipe)


@each_recipe
@pytest.mark.parametrize("empty", [{"batch": 0}, {"seq_q": 0}, {"seq_kv": 0}], ids=str)
def test_nothing_to_attend(empty, recipe, device):
    """Zeros and -inf, also when a graph with dynamic sizes was compiled on a full batch."""
    step = torch.compile(lambda c: (c.forward(recipe), c.backward(recipe)), backend="aot_eager", dynamic=True)
    full = {"batch": 2, "seq_q": 5, "seq_kv": 7}
    step(make_case(Shape(**full), device))
    case = make_case(Shape(**{**full, **empty}), device)
    (out, high_precision_out, lse, _), grads = step(case)
    assert bool((out == 0).all() and (high_precision_out == 0).all() and (lse == -torch.inf).all())
    for grad, x in zip(grads, (case.q, case.k, case.v)):
        assert_same_bits(grad, torch.zeros_like(x))


@each_recipe
def test_arguments_are_honoured(recipe, device):
    case = make_case(Shape(), device)
    inputs = case.q, case.k, case.v

    def run(**options):
        return attn_qat.attention(*inputs, recipe=recipe, **options)

    default, first, second = run(), run(softmax_scale=0.3), run(softmax_scale=0.05)
    assert not torch.equal(default, first) and not torch.equal(first, second)
    for got, scale in (default, 64**-0.5), (first, 0.3), (second, 0.05):
        want = reference.forward(*(x.cpu() for x in inputs), scale, False, recipe)[0]
        assert_close(got, want)
    assert_same_bits(run(softmax_scale=1), run(softmax_scale=1.0))
    assert_same_bits(run(softmax_scale=0.125), default)
    args = case.backward_args(recipe, case.forward(recipe))[:6]
    assert not torch.equal(*(OPS.backward(*args, scale, False, recipe)[0] for scale in (0.3, 0.05)))


@pytest.mark.parametrize(
    "name, value", [("dropout_p", 0.1), ("attn_mask", None), ("scale", 0.1), ("window", 8)]
)
def test_unknown_arguments_are_refused(name, value, device):
    case = make_case(Shape(), device)
    with pytest.raises(TypeError, match=name):
        attn_qat.attention(case.q, case.k, case.v, **{name: value})
    with pytest.raises(TypeError):
        attn_qat.attention(case.q, case.k, case.v, value)  # no fourth positional argument


@each_recipe
@pytest.mark.parametrize("scale", [0.0, -0.125, math.inf, -math.inf, math.nan, 1e-60])
def test_bad_scales_are_refused(scale, recipe, device):
    case = make_case(Shape(), device)
    with pytest.raises(ValueError, match=r"softmax_scale .*takes a finite positive"):
        attn_qat.attention(case.q, case.k, case.v, softmax_scale=scale, recipe=recipe)


@each_recipe
def test_lse_of_equal_scores(recipe, device):
    """Natural logarithm of the number of keys seen, FP32, contiguous (B, H, S_q)."""
    case = make_case(Shape(2, 2, 2, 40, 40, 64), device)
    case.q.zero_()
    ones = torch.ones(2, 2, 40, dtype=torch.float64)
    assert_lse(OPS.forward(*case.forward_args(recipe))[2], ones * math.log(40))
    causal = OPS.forward(case.q, case.k, case.v, case.softmax_scale, True, recipe)[2]
    assert_lse(causal, ones * torch.arange(1, 41, dtype=torch.float64).log())


@each_recipe
def test_halves_merge_by_lse(recipe, device):
    """Two halves of the keys, run alone and weighted by exp(lse - lse of the whole), give the whole."""
    case = make_case(Shape(1, 2, 2, 40, 96, 64), device)
    _, whole, lse, _ = case.forward(recipe)
    halves = zip(case.k.chunk(2, dim=2), case.v.chunk(2, dim=2))
    parts = [OPS.forward(case.q, k, v, *case.options(recipe)) for k, v in halves]
    assert_lse(torch.logaddexp(parts[0][2], parts[1][2]), lse)
    merged = sum((part[2] - lse).exp().double().unsqueeze(-1) * part[1].double() for part in parts)
    assert_close(merged, whole)


@each_recipe
@pytest.mark.parametrize(
    "causal, key_of", [(False, 1), (True, 1), (True, 2)], ids=["full", "causal", "causal half"]
)
def test_order_of_v(causal, key_of, recipe, device):
    """One key takes each row: O_i is V_i (or V_(i // 2)) within 10%, so no row or column is permuted."""
    rows = torch.arange(128)
    k = 60 * torch.eye(128)
    values = torch.tensor([1, 2, 3, 4, 6, -1, -2, -3, -4, -6, 1.5])[rows % 11]
    v = values[:, None].repeat(1, 128)
    inputs = (x.reshape(1, 1, 128, 128).to(device, torch.bfloat16) for x in (k[rows // key_of], k, v))
    out = attn_qat.attention(*inputs, is_causal=causal, recipe=recipe)[0, 0].float().cpu()
    want = values[rows // key_of, None]
    assert bool(((out - want).abs() <= 0.1 * want.abs()).all())


UNIFORM_DV = {16: 0.9375, 64: 0.75, 128: 1, 256: 1, 512: 1, 683: 683 / 1024, 1024: 1, 2048: 0, 4096: 0}


@pytest.mark.parametrize("length, ratio", UNIFORM_DV.items())
def test_dv_of_uniform_attention(length, ratio, device):
    """P = 1/S. The cudnn recipe keeps fq(1/S) * S of dV, nothing at all from 2048 on; fp4 keeps 1.03125."""
    case = make_case(Shape(1, 1, 1, 16, length, 64), device)
    case.q.zero_()
    exact = case.grad_out.double().cpu().sum(2, keepdim=True).expand(-1, -1, length, -1) / length
    for recipe, factor in ("cudnn", ratio), ("fp4", 1.03125), ("fp4_qk", 1.0):
        assert_close(case.backward(recipe)[2], factor * exact, name=recipe)


@pytest.mark.parametrize("length, cudnn", [(1024, 0.20), (4096, 0.53)])
def test_dv_on_long_rows(length, cudnn, device):
    """Distance of dV from that of an unquantised P, unit normal inputs: it grows in cudnn, is 9% in fp4."""
    case = make_case(Shape(1, 1, 1, length, length, 64), device)
    exact = case.backward("fp4_qk")[2]
    assert relative_error(case.backward("cudnn")[2], exact) == pytest.approx(cudnn, abs=0.03)
    assert relative_error(case.backward("fp4")[2], exact) == pytest.approx(0.09, abs=0.015)


@pytest.mark.parametrize("recipe", ["fp4", "fp4_qk"])
def test_forward_and_backward_share_p(recipe, device):
    """With one-hot v and grad_out, out is P^ and dv its transpose: same codes (neighbours are 14% apart)."""
    case = make_case(Shape(1, 1, 1, 64, 64, 64), device)
    case.v.copy_(6 * torch.eye(64)), case.grad_out.copy_(torch.eye(64))
    saved = case.forward(recipe)
    p_forward = (saved[0] / 6).double().cpu()
    p_backward = case.backward(recipe, saved)[2].mT.double().cpu()
    assert torch.equal(p_forward == 0, p_backward == 0)
    assert bool(((p_forward - p_backward).abs() <= 0.02 * p_forward).all())  # both are rounded to BF16


@pytest.mark.parametrize("recipe, kept", [("cudnn", [0, 0]), ("fp4", [1, 0]), ("fp4_qk", [1, 1])])
def test_floor_of_p(recipe, kept, device):
    """Blocks of 16 keys with P relative to the row maximum of 1, 2^-20 and 2^-23: fp4 keeps the second."""
    case = make_case(Shape(1, 1, 1, 1, 48, 16), device, dtype=torch.float32)
    for x in (case.q, case.k, case.v, case.grad_out):
        x.zero_()
    # q . k is 0, -20 and -23; a 6 where the other operand has 0 makes every block scale 1
    case.q[..., :3] = torch.tensor([6.0, 2.0, 2.0])
    case.k[..., 3] = 6
    case.k[:, :, 16:32, :3] = torch.tensor([-3.0, -1.0, 0.0])
    case.k[:, :, 32:, :3] = torch.tensor([-3.0, -2.0, -0.5])
    case.v[:, :, 16:32, 0] = case.v[:, :, 32:, 1] = 6
    case.grad_out[..., 0] = 1
    log2 = type(case)(case.q, case.k, case.v, case.grad_out, math.log(2), False)  # then t is q . k
    saved = log2.forward(recipe)
    exact = torch.tensor([6 * 2.0**-20, 6 * 2.0**-23])
    assert_close(saved[1][0, 0, 0, :2], exact, 1e-5, "high_precision_out")
    assert_close(saved[0][0, 0, 0, :2], exact * torch.tensor(kept), 1e-5, "out")
    dv = log2.backward(recipe, saved)[2][0, 0, :, 0]
    want = torch.tensor([2.0**-20, 2.0**-23]) * torch.tensor(kept) / 16
    assert_close(dv[16:].view(2, 16), want[:, None].expand(2, 16), name="dv")


@each_recipe
@pytest.mark.parametrize("head_dim", [64, 128])
def test_near_unquantised_attention(head_dim, recipe, device):
    """Cosine with full-precision attention, unit normal inputs: 0.98 with P in FP4, 0.99 without."""
    case = make_case(Shape(1, 4, 4, 512, 512, head_dim), device)
    inputs = (x.double().cpu() for x in (case.q, case.k, case.v))
    exact = torch.nn.functional.scaled_dot_product_attention(*inputs)
    cosine = torch.cosine_similarity(case.forward(recipe)[0].double().cpu().flatten(), exact.flatten(), dim=0)
    assert cosine.item() == pytest.approx(0.99 if recipe == "fp4_qk" else 0.98, abs=0.003)


@each_recipe
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_inputs_are_not_written(causal, recipe, device):
    case = make_case(Shape(2, 4, 2, 40, 50, 64, causal), device)
    saved = case.forward(recipe)
    args = [*case.backward_args(recipe, saved), *case.half_args(recipe, saved)]
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in tensors]
    outputs = [*case.forward(recipe), *case.backward(recipe, saved)]
    outputs += [
        OPS.backward_dq(*case.half_args(recipe, saved)),
        *OPS.backward_dkdv(*case.half_args(recipe, saved)),
    ]
    data, scales = packed = attn_qat.quantize(case.q)
    tensors += packed
    before += [data.clone(), scales.clone()]
    outputs += [attn_qat.fake_quantize(case.q), attn_qat.dequantize(data, scales, case.q.dtype)]
    for now, then in zip(tensors, before):
        assert_same_bits(now, then)
    owned = {x.untyped_storage().data_ptr() for x in tensors}
    assert not owned & {x.untyped_storage().data_ptr() for x in outputs}, "an output aliases an input"
    assert len({x.untyped_storage().data_ptr() for x in outputs}) == len(outputs), "two outputs share memory"
