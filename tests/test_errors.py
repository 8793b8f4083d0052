"""Every wrong argument is refused before anything is computed, by a sentence that names it and what it got.

A refusal is asked for three times: of the operator, of the Python function, and of the operator's fake
kernel, which torch.compile meets first. The fake kernel judges dtypes, shapes, devices and names; strides,
addresses and numbers are left to the operator.
"""

import math
import re
from dataclasses import dataclass

import pytest
import torch
from cases import Shape, as_bshd, make_case
from torch._subclasses.fake_tensor import FakeTensorMode

import attn_qat

OPS = torch.ops.attn_qat
SHAPE = Shape(2, 4, 2, 32, 48, 64)


def good_arguments(op: str, device) -> dict:
    """A call of `op` that works, by argument name."""
    case = make_case(SHAPE, device)
    options = {"softmax_scale": 0.125, "is_causal": False, "recipe": "fp4"}
    attention = {"q": case.q, "k": case.k, "v": case.v}
    _, high_precision_out, lse, row_exponent = OPS.forward(**attention, **options)
    data, scales = OPS.quantize(case.q)
    saved = {"lse": lse, "row_exponent": row_exponent}
    common = {"grad_out": case.grad_out, **attention, **saved, **options}
    half = {**common, "delta": torch.zeros_like(lse)}
    backward = {**common, "high_precision_out": high_precision_out}
    workspace = torch.empty(OPS.backward_workspace_bytes(case.q, case.k), dtype=torch.uint8, device=device)
    grads = {f"d{name}": torch.empty_like(x) for name, x in attention.items()}
    return {
        "fake_quantize": {"x": case.q, "axis": -1, "global_scale": torch.ones(1, device=device)},
        "quantize": {"x": case.q, "axis": -1, "global_scale": torch.ones(1, device=device)},
        "dequantize": {"data": data, "scales": scales, "dtype": torch.bfloat16, "axis": -1},
        "forward": {**attention, **options},
        "preprocess": {"high_precision_out": high_precision_out, "grad_out": case.grad_out},
        "backward_dq": half,
        "backward_dkdv": half,
        "backward": backward,
        "backward.out": {**backward, "workspace": workspace, **grads},
        "backward_workspace_bytes": {"q": case.q, "k": case.k},
    }[op]


@dataclass(frozen=True)
class Wrong:
    """`change` spoils the named argument; the message holds that name and matches `got`."""

    argument: str
    change: object
    got: str
    fake: bool = True  # the fake kernel can see it

    def __str__(self) -> str:
        return f"{self.argument}: {self.got}"


def misaligned(x):
    """The same values, two bytes (one element) past an aligned address."""
    storage = torch.empty(x.numel() + 16, dtype=x.dtype, device=x.device)
    return storage[1 : 1 + x.numel()].view(x.shape).copy_(x)


def odd_rows(x):
    """The same values in rows of head_dim + 1 elements."""
    storage = torch.empty(*x.shape[:-1], x.shape[-1] + 1, dtype=x.dtype, device=x.device)
    return storage[..., :-1].copy_(x)


def shrink(x, dim):
    return x.narrow(dim, 0, x.shape[dim] - 1).contiguous()


def tensor(name, *, first=False):
    """What can be wrong with q, k, v, grad_out and their like. first: the others are compared with it."""
    wrong = [
        Wrong(name, lambda x: x.double(), "float64"),
        Wrong(name, lambda x: x.int(), "int32"),
        Wrong(name, lambda x: x[0], r"3 dimensions|\(\d+, \d+, 64\)"),
        Wrong(name, lambda x: x.mT.contiguous().mT, "stride", fake=False),
        Wrong(name, odd_rows, "stride.*16 bytes", fake=False),
        Wrong(name, misaligned, "address.*16", fake=False),
    ]
    if not first:
        wrong.append(Wrong(name, lambda x: x.half(), "float16.*bfloat16"))
        wrong.append(Wrong(name, lambda x: x.to("meta"), "meta|device"))
        wrong += [Wrong(name, lambda x, d=d: shrink(x, d), r"\(") for d in range(4) if (name, d) not in FREE]
    return wrong


FREE = {("k", 1), ("k", 2)}  # k alone says how many heads and keys there are; then v is the one that differs


def row_values(name, dtype):
    other = torch.float64 if dtype == torch.float32 else torch.int64
    return [
        Wrong(name, lambda x: x.to(other), str(other).removeprefix("torch.")),
        Wrong(name, lambda x: x.unsqueeze(-1), r"\(2, 4, 32, 1\)"),
        Wrong(name, lambda x: shrink(x, 2), r"\(2, 4, 31\)"),
        Wrong(name, lambda x: as_bshd(x.unsqueeze(-1)).squeeze(-1), "stride|contiguous", fake=False),
    ]


BAD_SCALES = (0.0, -0.5, math.inf, -math.inf, math.nan, 1e-60)
OPTIONS = [
    *(Wrong("softmax_scale", lambda _, s=s: s, f"is {s:g},", fake=False) for s in BAD_SCALES),
    Wrong("recipe", lambda _: "fp8", "fp8.*cudnn.*fp4.*fp4_qk"),
    Wrong("recipe", lambda _: "", "cudnn.*fp4.*fp4_qk"),
]
ATTENTION = [
    *tensor("q", first=True),
    *tensor("k"),
    *tensor("v"),
    Wrong("q", lambda x: x[:, :3].contiguous(), "2 heads and q 3"),
    Wrong("q", lambda x: x[..., :8].contiguous(), "head_dim 8, takes a multiple of 16"),
    Wrong("q", lambda x: x[..., :40].contiguous(), "head_dim 40, takes a multiple of 16"),
    Wrong("q", lambda x: x.repeat(1, 1, 1, 5), "head_dim 320, takes .* up to 256"),
]
EXPONENT = row_values("row_exponent", torch.int32)
COMMON = [*ATTENTION, *tensor("grad_out"), *row_values("lse", torch.float32), *EXPONENT, *OPTIONS]
HALF = [*COMMON, *row_values("delta", torch.float32)]
BACKWARD = [*COMMON, *tensor("high_precision_out")]
QUANTIZED = [
    Wrong("x", lambda x: x.double(), "float64"),
    Wrong("x", lambda x: x.int(), "int32"),
    Wrong("x", lambda x: x[0, 0, 0, 0], "0 dim"),
    Wrong("x", lambda x: x[None], "5 dim"),
    Wrong("x", lambda x: x.mT.contiguous().mT, "stride", fake=False),
    *(Wrong("axis", lambda _, a=a: a, f"is {a} for") for a in (-5, -4, -3, 0, 1, 4)),
    Wrong("global_scale", lambda g: g.double(), "float64"),
    Wrong("global_scale", lambda g: g.repeat(2), r"\(2,\)"),
    Wrong("global_scale", lambda g: g.to("meta"), "meta|device"),
]
WRONG = {
    "fake_quantize": QUANTIZED,
    "quantize": [*QUANTIZED, Wrong("x", lambda x: x[..., :47].contiguous(), "47")],
    "dequantize": [
        Wrong("data", lambda x: x.view(torch.int8), "int8|dtype"),
        Wrong("data", lambda x: x[None], "5 dim"),
        Wrong("data", lambda x: x[..., ::2], "stride", fake=False),
        Wrong("scales", lambda x: x.float(), "float32"),
        Wrong("scales", lambda x: x.view(torch.uint8), "uint8"),
        Wrong("scales", lambda x: shrink(x, 3), r"\(2, 4, 32, 3\).*\(2, 4, 32, 4\)"),
        Wrong("scales", lambda x: shrink(x, 2), r"\(2, 4, 31, 4\).*\(2, 4, 32, 4\)"),
        Wrong("dtype", lambda _: torch.float64, "float64"),
        Wrong("axis", lambda _: 1, r"\b1\b"),
    ],
    "forward": [*ATTENTION, *OPTIONS],
    "preprocess": [*tensor("high_precision_out", first=True), *tensor("grad_out")],
    "backward_dq": HALF,
    "backward_dkdv": HALF,
    "backward": BACKWARD,
    "backward.out": [
        *BACKWARD,
        *(w for name in ("dq", "dk", "dv") for w in tensor(name)),
        Wrong("dq", lambda x: x[:, :1].expand_as(x), "strides.*share no memory", fake=False),
        Wrong("dk", lambda x: x.as_strided(x.shape, (64, 64, 64, 1)), "strides.*share no memory", fake=False),
        Wrong("workspace", lambda w: w[:-1], r"\(\d+,\).*bytes", fake=False),
        Wrong("workspace", lambda w: w.view(torch.int8), "dtype"),
        Wrong("workspace", lambda w: w[None], r"\(1, \d+\)", fake=False),
        Wrong("workspace", lambda w: torch.cat((w, w))[8:], "address", fake=False),
        Wrong("workspace", lambda w: w.to("meta"), "meta|device"),
    ],
    "backward_workspace_bytes": [w for w in (*tensor("q", first=True), *tensor("k")) if "meta" not in w.got],
}
CALLS = [pytest.param(op, wrong, id=f"{op}-{wrong}") for op, table in WRONG.items() for wrong in table]
FAKE_CALLS = [call for call in CALLS if call.values[1].fake and call.values[0] != "backward_workspace_bytes"]


def operator(op):
    name, _, overload = op.partition(".")
    return getattr(getattr(OPS, name), overload or "default")


def function(op):
    return getattr(attn_qat, op.replace(".", "_"))


def spoiled(op, wrong, device) -> dict:
    arguments = good_arguments(op, device)
    return {**arguments, wrong.argument: wrong.change(arguments[wrong.argument])}


@pytest.mark.parametrize("op", WRONG)
def test_the_call_that_is_spoiled_works(op, device):
    """Otherwise the refusals below could be about something else."""
    arguments = good_arguments(op, device)
    assert type(operator(op)(**arguments)) is type(function(op)(**arguments))


@pytest.mark.parametrize("op, wrong", CALLS)
def test_refusal(op, wrong, device):
    arguments = spoiled(op, wrong, device)
    for call in operator(op), function(op):
        with pytest.raises(ValueError) as refusal:
            call(**arguments)
        text = str(refusal.value)
        assert text.startswith(f"{op}: "), text
        assert_names(text, wrong)


def assert_names(text: str, wrong: Wrong) -> None:
    assert re.search(rf"\b{wrong.argument}\b", text), text
    assert re.search(wrong.got, text), text
    assert "takes" in text, text


@pytest.mark.parametrize("op, wrong", FAKE_CALLS)
def test_fake_kernel_refuses_alike(op, wrong, device):
    arguments = spoiled(op, wrong, device)
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
        with pytest.raises(ValueError) as refusal:
            operator(op)(**fakes)
    assert_names(str(refusal.value), wrong)


@pytest.mark.parametrize("first, second", [("dq", "dk"), ("dk", "dv"), ("dv", "dq")])
def test_gradients_take_memory_of_their_own(first, second, device):
    case = make_case(Shape(1, 2, 2, 32, 32, 64), device)
    arguments = good_arguments("backward.out", device)
    saved = dict(
        zip(
            ("high_precision_out", "lse", "row_exponent"),
            OPS.forward(case.q, case.k, case.v, 0.125, False, "fp4")[1:],
        )
    )
    arguments |= {"q": case.q, "k": case.k, "v": case.v, "grad_out": case.grad_out, **saved}
    arguments |= {f"d{name}": torch.empty_like(case.q) for name in "qkv"}
    arguments[second] = arguments[first]
    with pytest.raises(
        ValueError, match=f"d[qkv] starts where ({first}|{second}) does, takes memory of its own"
    ):
        attn_qat.backward_out(**arguments)


@pytest.mark.parametrize("call", [attn_qat.attention, attn_qat.infer], ids=["attention", "infer"])
@pytest.mark.parametrize(
    "shape, got",
    [((2, 4, 32, 0), "q has head_dim 0, takes"), ((), "q has 0 dimensions"), ((2, 4, 32), "q has 3 dim")],
)
def test_shapes_that_have_no_default_scale(call, shape, got, device):
    x = torch.zeros(shape, device=device, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=got):
        call(x, x, x)


@pytest.mark.parametrize(
    "takes_recipe", [attn_qat.Recipe, lambda x: attn_qat.Attention(recipe=x)], ids=["Recipe", "Attention"]
)
def test_recipes_that_do_not_exist(takes_recipe):
    with pytest.raises(ValueError, match="^recipe is 'fp8', takes 'cudnn', 'fp4' or 'fp4_qk'$"):
        takes_recipe("fp8")
