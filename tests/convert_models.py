"""Models, calls and fixtures of the tests of `attn_qat.convert`."""

import pytest
import torch
import torch.nn.functional as F
from contract import assert_same_bits
from torch import nn
from torch.utils.checkpoint import checkpoint

import attn_qat

HEADS, HEAD_DIM = 2, 64
WIDTH = HEADS * HEAD_DIM
RECIPE = "fp4_qk"  # causal and deterministic in each row, so that runs of different kinds can be compared


class SelfAttention(nn.Module):
    def __init__(self, causal=True):
        super().__init__()
        self.causal = causal
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *, attn_mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=self.causal and attn_mask is None)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn1 = SelfAttention()
        self.attn2 = SelfAttention(causal=False)

    def forward(self, x):
        x = x + self.attn1(self.norm(x))
        return x + self.attn2(self.norm(x))


class Model(nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


ALL = ["blocks.0.attn1", "blocks.0.attn2", "blocks.1.attn1", "blocks.1.attn2"]


class Call(nn.Module):
    """One scaled_dot_product_attention call."""

    def forward(self, *args, **kwargs):
        return F.scaled_dot_product_attention(*args, **kwargs)


@pytest.fixture(autouse=True)
def fresh_fixture():
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.fixture(name="make")
def make_fixture(device):
    return lambda cls=Model, *args, **kwargs: cls(*args, **kwargs).to(device, torch.bfloat16)


@pytest.fixture(name="draw")
def draw_fixture(device):
    generator = torch.Generator().manual_seed(1)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device, torch.bfloat16)


@pytest.fixture(name="x")
def x_fixture(draw):
    return draw(2, 40, WIDTH)


def fake_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """What a replaced call must compute, for patching torch.nn.functional."""
    assert attn_mask is None and dropout_p == 0.0
    return attn_qat.attention(query, key, value, is_causal=is_causal, softmax_scale=scale, recipe=RECIPE)


def gradients(model, x):
    x = x.detach().requires_grad_()
    model.zero_grad()
    out = model(x)
    out.float().square().mean().backward()
    return out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())


def assert_all_same(got, want):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(a, b, str(i))
