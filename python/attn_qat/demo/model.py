"""A small byte-level transformer whose attention is chosen at each call: plain BF16 or one of the recipes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..autograd import attention

BYTES = 256
BF16 = "bf16"  # names plain attention where otherwise a recipe stands


def attend(q: Tensor, k: Tensor, v: Tensor, kind: str) -> Tensor:
    """Causal attention on BF16 operands. The rest of the model is FP32, so that only attention differs."""
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    if kind == BF16:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).float()
    return attention(q, k, v, is_causal=True, recipe=kind).float()


class Block(nn.Module):
    def __init__(self, width: int, heads: int, head_dim: int, hidden: int):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, width, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        for last in (self.out, self.down):  # every block starts as the identity
            nn.init.zeros_(last.weight)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], kind: str) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        o = attend(rotate(q, rotation), rotate(k, rotation), v, kind)
        x = x + self.out(o.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding; pairs are (i, i + head_dim / 2)."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class ByteModel(nn.Module):
    def __init__(self, *, width: int, layers: int, heads: int, head_dim: int, hidden: int, context: int):
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(Block(width, heads, head_dim, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        nn.init.zeros_(self.head.weight)
        frequency = 10000.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
        angle = torch.arange(context)[:, None] * frequency
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor, kind: str) -> Tensor:
        """x: bytes (batch, length), int64 -> logits (batch, length, 256)."""
        length = x.shape[1]
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h, (self.cos[:length], self.sin[:length]), kind)
        return self.head(self.norm(h))

    def loss(self, x: Tensor, y: Tensor, kind: str) -> Tensor:
        """Mean cross-entropy in nats per byte."""
        return F.cross_entropy(self(x, kind).flatten(0, 1), y.flatten())
