"""`attn_qat.convert`: wrong arguments, and modules that cannot be converted."""

import pytest
import torch
from convert_models import Block, Model, fresh_fixture, make_fixture  # noqa: F401  fixtures among them
from torch import nn

import attn_qat

WRONG = {
    "model": (lambda m: attn_qat.convert("model"), TypeError, "model is a str, takes a torch.nn.Module"),
    "recipe": (lambda m: attn_qat.convert(m, recipe="fp8"), ValueError, "fp8"),
    "unsupported": (
        lambda m: attn_qat.convert(m, unsupported="skip"),
        ValueError,
        "unsupported is 'skip', takes 'raise'",
    ),
    "name": (
        lambda m: attn_qat.convert(m, modules="block.0"),
        ValueError,
        "modules holds 'block.0', which matches no",
    ),
    "exclude": (
        lambda m: attn_qat.convert(m, exclude=["attn3"]),
        ValueError,
        "exclude holds 'attn3', which matches no",
    ),
    "type": (lambda m: attn_qat.convert(m, modules=[m]), TypeError, "takes names, patterns or a predicate"),
    "none": (lambda m: attn_qat.convert(m, modules=lambda *_: False), ValueError, "modules chooses none"),
    "no attention": (lambda m: attn_qat.convert(m, modules="*.norm"), ValueError, "modules chooses none"),
    "all excluded": (lambda m: attn_qat.convert(m, exclude=""), ValueError, "modules chooses none"),
}


@pytest.mark.parametrize("call, error, message", WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments(call, error, message):
    model = Model()
    with pytest.raises(error, match=message):
        call(model)
    assert all(
        type(m).__module__ != "attn_qat.convert" and "_attn_qat_route" not in vars(m) for m in model.modules()
    )


def _converted_already(model):
    attn_qat.convert(model.blocks[1])


def _scripted(model):
    class Plain(nn.Module):
        def forward(self, x):
            return x

    model.blocks[1].attn1 = torch.jit.script(Plain())


def _traced(model):
    model.blocks[1].attn1 = torch.fx.symbolic_trace(nn.Identity())


def _hooked(model):
    attention = model.blocks[1].attn1
    attention.forward = lambda x: x


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    "prepare, reason",
    [
        (_converted_already, "is converted already"),
        (_scripted, "is a ScriptModule"),
        (_traced, "is a GraphModule"),
        (_hooked, "has a forward of its own"),
    ],
)
def test_a_module_that_cannot_be_converted_is_named_and_nothing_converted(prepare, reason):
    model = Model()
    prepare(model)
    with pytest.raises(ValueError, match=rf"'blocks.1(.attn1)?' {reason}"):
        attn_qat.convert(model)
    assert type(model) is Model and type(model.blocks[0]) is Block
    attn_qat.convert(model, modules="blocks.0").undo()


class Forwards(nn.Module):
    """Answers for the module inside, as trainers' wrappers do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return self.inner(x)


def test_a_wrapper_around_a_converted_module_is_told_apart(make):
    wrapped = Forwards(make(Model))
    with attn_qat.convert(wrapped.inner):
        with pytest.raises(ValueError, match="'inner' is converted already"):
            attn_qat.convert(wrapped)
