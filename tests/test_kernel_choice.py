"""Which kernel family serves a call, and that the Hopper family computes what the portable one does."""

import pytest
import torch
from cases import RECIPES, Shape, make_case
from contract import RELATIVE, assert_close, check_backward, check_forward

import attn_qat


def on_hopper(device):
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@pytest.fixture
def hopper(device):
    if not on_hopper(device):
        pytest.skip("needs pytest --device cuda on compute capability 9.0")
    return device


def tensors(device, head_dim=128, dtype=torch.bfloat16, length=64):
    return [torch.zeros(1, 2, length, head_dim, dtype=dtype, device=device) for _ in range(3)]


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_explain_names_the_kernels(device, op):
    want = "cpu" if device.type == "cpu" else "sm90" if on_hopper(device) else "mma_sync"
    assert attn_qat.explain(op, *tensors(device)).split(" ")[0] == want


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_explain_says_why_a_family_does_not_take_a_problem(device, op):
    if device.type == "cpu":
        pytest.skip("one family only")
    assert "bfloat16 or float16" in attn_qat.explain(op, *tensors(device, dtype=torch.float32))
    assert "head_dim 64 or 128" in attn_qat.explain(op, *tensors(device, head_dim=96))


def test_explain_falls_to_the_portable_kernels_visibly(hopper):
    q, k, v = (tensors(hopper, length=n)[0] for n in (4, 0, 0))
    assert attn_qat.explain("forward", q, k, v) == "mma_sync (sm90: takes at least one query and one key)"


def test_explain_takes_forward_or_backward(device):
    with pytest.raises(ValueError, match="explain: op is 'infer', takes 'forward' or 'backward'"):
        attn_qat.explain("infer", *tensors(device))


def test_a_family_can_be_switched_off(hopper, monkeypatch):
    monkeypatch.setenv("ATTN_QAT_KERNELS", "mma_sync")
    assert (
        attn_qat.explain("forward", *tensors(hopper)) == "mma_sync (sm90: switched off by ATTN_QAT_KERNELS)"
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("family", ["sm90", "mma_sync"])
def test_each_family_against_the_reference(hopper, monkeypatch, family, head_dim, recipe):
    monkeypatch.setenv("ATTN_QAT_KERNELS", family)
    case = make_case(Shape(2, 4, 2, 333, 400, head_dim, causal=True), hopper)
    check_backward(case, recipe, check_forward(case, recipe))


def draw(generator, *choices):
    return choices[int(torch.randint(len(choices), (), generator=generator))]


def random_problem(generator, device):
    """q, k, v, grad_out with random sizes, layouts and value scales, and the options of the operators."""
    heads_kv = draw(generator, 1, 2, 3)
    heads_q = heads_kv * draw(generator, 1, 1, 2, 3)
    batch, head_dim = draw(generator, 1, 2), draw(generator, 64, 128)
    queries, keys = (int(torch.randint(1, 700, (), generator=generator)) for _ in range(2))
    dtype, scale = draw(generator, torch.bfloat16, torch.float16), draw(generator, 0.1, 1.0, 1.0, 3.0)

    def values(heads, length):
        layout = draw(generator, "bhsd", "bshd", "packed")
        if layout == "bhsd":
            x = torch.randn(batch, heads, length, head_dim, generator=generator)
            return (x * scale).to(device, dtype)
        if layout == "bshd":
            x = torch.randn(batch, length, heads, head_dim, generator=generator)
            return (x * scale).to(device, dtype).transpose(1, 2)
        x = torch.randn(batch, length, heads, 3, head_dim, generator=generator)  # one of three side by side
        return (x * scale).to(device, dtype)[:, :, :, 1].transpose(1, 2)

    q, grad_out = values(heads_q, queries), values(heads_q, queries)
    k, v = values(heads_kv, keys), values(heads_kv, keys)
    return q, k, v, grad_out, (head_dim**-0.5, draw(generator, True, False), draw(generator, *RECIPES))


def results(problem, saved=None, deterministic=True):
    q, k, v, grad_out, options = problem
    out, high_precision_out, lse, row_exponent = attn_qat.forward(q, k, v, *options)
    used = saved or (high_precision_out, lse, row_exponent)
    grads = attn_qat.backward(grad_out, q, k, v, *used[:2], *options, used[2], deterministic)
    return (out, high_precision_out, *grads), (high_precision_out, lse, row_exponent)


def test_a_thousand_random_problems_against_the_portable_kernels(hopper, monkeypatch):
    """Any two kernels agree within the contract's bound; codes near a rounding tie may differ in small problems."""
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for trial in range(1000):
        problem = random_problem(generator, hopper)
        monkeypatch.setenv("ATTN_QAT_KERNELS", "mma_sync")
        want, saved = results(problem)
        monkeypatch.setenv("ATTN_QAT_KERNELS", "sm90")
        got, own = results(problem, saved, deterministic=trial % 2 == 0)
        assert torch.equal(own[2], saved[2]), trial  # row exponents
        assert torch.equal(own[1].isinf(), saved[1].isinf()), trial
        for name, x, y in zip(("out", "high_precision_out", "dq", "dk", "dv"), got, want, strict=True):
            error = (x.float() - y.float()).norm() / y.float().norm().clamp_min(1e-3)
            worst = max(worst, error.item())
            assert error < 2 * RELATIVE, (
                trial,
                name,
                error.item(),
                [tuple(t.shape) for t in problem[:2]],
                problem[4],
            )
    assert worst > 0  # the two families did run


def test_the_same_bits_on_twenty_runs_under_load(hopper):
    """While other streams keep multiprocessors and memory busy, so that thread blocks start late and out of step."""
    case = make_case(Shape(2, 6, 3, 1500, 1500, 128, causal=True), hopper)
    wide = make_case(Shape(1, 4, 4, 1100, 2100, 64), hopper)
    streams = [torch.cuda.Stream(hopper) for _ in range(2)]
    square, block = torch.randn(2048, 2048, device=hopper), torch.empty(1 << 26, device=hopper)
    want = [(*saved, *c.backward("fp4", saved)) for c in (case, wide) for saved in [c.forward("fp4")]]
    torch.cuda.synchronize()
    for trial in range(20):
        with torch.cuda.stream(streams[0]):
            for _ in range(trial % 5):
                square @ square
        with torch.cuda.stream(streams[1]):
            torch.cuda._sleep(10_000 * trial)
            block.fill_(trial)
        for c, expected in zip((case, wide), want, strict=True):
            saved = c.forward("fp4")
            for x, y in zip((*saved, *c.backward("fp4", saved)), expected, strict=True):
                assert torch.equal(x, y), trial


@pytest.mark.parametrize("head_dim", [64, 128])
def test_unordered_gradients_are_as_close(device, head_dim):
    case = make_case(Shape(1, 4, 2, 500, 600, head_dim, causal=True), device)
    saved = case.forward("fp4")
    want = case.backward("fp4", saved)
    got = attn_qat.backward(*case.backward_args("fp4", saved), deterministic=False)
    for name, x, y in zip(("dq", "dk", "dv"), got, want, strict=True):
        assert_close(x, y, name=name)


def test_attention_passes_deterministic_to_its_gradient(device, monkeypatch):
    q, k, v = (
        torch.randn(1, 2, 40, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    seen = []
    original = torch.ops.attn_qat.backward
    monkeypatch.setattr(
        attn_qat.autograd.torch.ops.attn_qat, "backward", lambda *a: (seen.append(a[-1]), original(*a))[1]
    )
    for deterministic in (True, False):
        attn_qat.attention(q, k, v, deterministic=deterministic).sum().backward()
    attn_qat.Attention(deterministic=False)(q, k, v).sum().backward()
    assert seen == [True, False, False]


def test_unordered_into_the_callers_tensors(device):
    """backward.out takes the option too."""
    case = make_case(Shape(1, 2, 2, 200, 300, 64), device)
    saved = case.forward("fp4")
    want = case.backward("fp4", saved)
    got = {name: torch.full_like(x, torch.nan) for name, x in zip(("dq", "dk", "dv"), want, strict=True)}
    size = attn_qat.backward_workspace_bytes(case.q, case.k)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    attn_qat.backward_out(*case.backward_args("fp4", saved), workspace, **got, deterministic=False)
    for (name, x), y in zip(got.items(), want, strict=True):
        assert_close(x, y, name=name)
