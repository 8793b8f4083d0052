"""The bounds that every backend is held to, and the comparisons that use them."""

import math

import torch

from attn_qat import reference

RELATIVE = 6e-3  # O, O_hp, dQ, dK, dV: relative Frobenius error against the float64 reference
LSE = 1e-5  # log-sum-exp: absolute error


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want||. Zeros must be met exactly: 0 / 0 is 0 and anything else over 0 is inf."""
    want = want.detach().double().cpu()
    difference = torch.linalg.vector_norm(got.detach().double().cpu() - want).item()
    norm = torch.linalg.vector_norm(want).item()
    return difference / norm if norm else (0.0 if difference == 0 else math.inf)


def _worst(difference: torch.Tensor, got: torch.Tensor, want: torch.Tensor) -> str:
    where = torch.unravel_index(difference.nan_to_num(torch.inf).argmax(), difference.shape)
    coordinate = tuple(int(i) for i in where)
    return f"worst at {coordinate}: got {got[coordinate].item()!r}, want {want[coordinate].item()!r}"


def assert_close(got, want, bound: float = RELATIVE, name: str = "") -> None:
    """The relative Frobenius error is within bound. Shapes must agree; NaN fails; dtypes may differ."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    error = relative_error(got, want)
    if not error <= bound:  # also when it is NaN
        worst = _worst((got - want).abs(), got, want)
        raise AssertionError(f"{name}: relative error {error:.3g} > {bound:g}; {worst}")


def assert_close_up_to_ties(got, reference_at, names) -> None:
    """Tensors (B, H, S, D) against those of reference_at(nudge), each head by itself.

    P is an FP32 result, so that a value of P near a rounding tie may get the FP4 code, or a block near one
    the scale, on the other side. In a small problem one such step exceeds the bound. Where the reference
    disagrees, those for scores moved by a few FP32 steps up and down count as well, element by element.
    """
    wants = reference_at(0.0)
    others = None
    for i, (name, x, want) in enumerate(zip(names, got, wants)):
        for head in range(x.shape[1]):
            if relative_error(x[:, head], want[:, head]) <= RELATIVE:
                continue
            others = others or [reference_at(-(2.0**-20)), reference_at(2.0**-20)]
            candidates = torch.stack([want, *(other[i] for other in others)])[:, :, head]
            nearest = (candidates - x[:, head].double().cpu()).abs().argmin(0, keepdim=True)
            assert_close(x[:, head], candidates.gather(0, nearest)[0], name=f"{name}, head {head}")


def check_forward(case, recipe: str):
    """Every output of forward against the reference; returns them."""
    saved = case.forward(recipe)
    want_lse = case.reference_forward(recipe)[2]
    for x in saved[:2]:
        assert x.shape == case.q.shape and x.dtype == case.q.dtype and x.is_contiguous()
    names = ("out", "high_precision_out")
    assert_close_up_to_ties(saved[:2], lambda nudge: case.reference_forward(recipe, nudge)[:2], names)
    assert_lse(saved[2], want_lse)
    assert_row_exponent(saved[3], case, recipe)
    return saved


def check_backward(case, recipe: str, saved) -> None:
    """dq, dk and dv against the reference that gets the same saved tensors."""
    grads = case.backward(recipe, saved)
    for grad, x in zip(grads, (case.q, case.k, case.v)):
        assert grad.shape == x.shape and grad.dtype == x.dtype and grad.is_contiguous()
    names = ("dq", "dk", "dv")
    if case.k.shape[2] == 1:  # P is 1, and dS is 0 up to rounding: nothing to be relative to
        assert grads[0].abs().max() <= 1e-4 and grads[1].abs().max() <= 1e-4
        grads, names = grads[2:], names[2:]
    count = len(names)
    reference_at = lambda nudge: case.reference_backward(recipe, saved, nudge)[-count:]  # noqa: E731
    assert_close_up_to_ties(grads, reference_at, names)


def assert_lse(got: torch.Tensor, want: torch.Tensor) -> None:
    """Absolute error within LSE. Beyond 64, where FP32 steps are as wide, within 8 steps. -inf is exact."""
    assert got.dtype == torch.float32 and got.shape == want.shape and got.is_contiguous()
    got, want = got.double().cpu(), want.double().cpu()
    assert torch.equal(got == -torch.inf, want == -torch.inf), "lse: -inf in different rows"
    seen = want != -torch.inf
    bound = torch.where(want.abs() <= 64, LSE, want.abs() * 2.0**-20)
    difference = torch.where(seen, (got - want).abs(), 0.0)
    assert bool((difference <= bound)[seen].all()), f"lse: {_worst(difference, got, want)}"


def assert_row_exponent(got: torch.Tensor, case, recipe: str) -> None:
    """E is the ceiling of the row maximum of t, up to the rounding of t; NO_KEY in a row that sees no key."""
    assert got.dtype == torch.int32 and got.is_contiguous()
    q, k, v = (x.cpu() for x in (case.q, case.k, case.v))
    qh, kh, _ = reference.quantize_operands(q, k, v, recipe)
    kh = kh.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    maximum = reference.scores(qh.double(), kh, case.softmax_scale, case.is_causal).amax(-1)
    seen, above = maximum != -torch.inf, got.cpu() - maximum
    assert got.shape == maximum.shape and bool((got.cpu()[~seen] == reference.NO_KEY).all())
    tolerance = 1e-5 * maximum.abs().clamp(min=1)
    assert bool(((above > -tolerance) & (above < 1 + tolerance))[seen].all()), above[seen]


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, name: str = "") -> None:
    """Equal dtype, shape and values: NaN equals NaN, and the sign of a zero is free."""
    got, want = got.detach().cpu(), want.detach().cpu()
    found, wanted = (got.dtype, tuple(got.shape)), (want.dtype, tuple(want.shape))
    assert found == wanted, f"{name}: {found}, want {wanted}"
    if got.dtype == torch.float8_e4m3fn:
        got, want = got.view(torch.uint8), want.view(torch.uint8)
    wrong = ~((got == want) | ((got != got) & (want != want)))
    if wrong.any():
        worst = _worst(wrong.float(), got, want)
        raise AssertionError(f"{name}: {int(wrong.sum())} of {wrong.numel()} differ; {worst}")
