"""Quantisation-aware training of a whole block: torchao's for the linear layers, attn-qat's for attention.

python examples/torchao_linears.py [--device cuda]

torchao swaps linear modules and, at the end, their weights; attn-qat routes the attention between them.
Neither sees the other, and the order does not matter. Integers for the linear layers, because torchao's NVFP4
needs a GPU.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_
from torchao.quantization.qat import QATConfig

import attn_qat

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cpu")
parser.add_argument("--steps", type=int, default=30)
options = parser.parse_args()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(128, 3 * 128), nn.Linear(128, 128)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(128), Attention()
        self.mlp = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


torch.manual_seed(0)
model = nn.Sequential(Block(), Block()).to(options.device)
linears = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))

quantize_(model, QATConfig(linears, step="prepare"))
conversion = attn_qat.convert(model, recipe="fp4", modules="*.attention")

x = torch.randn(8, 64, 128, device=options.device)
target = x.roll(1, dims=1)
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
# On a GPU, attention kernels take 16-bit types.
with torch.autocast(options.device.split(":")[0], torch.bfloat16, enabled=options.device != "cpu"):
    for step in range(options.steps):
        loss = (model(x).float() - target).square().mean()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        if step in (0, options.steps - 1):
            print(f"step {step}: loss {loss.item():.4f}")

quantize_(model, QATConfig(linears, step="convert"))  # the weights are 4-bit integers now
model.eval()
with (
    torch.no_grad(),
    torch.autocast(options.device.split(":")[0], torch.bfloat16, enabled=options.device != "cpu"),
):
    print(f"quantised for inference: loss {(model(x).float() - target).square().mean().item():.4f}")
print(type(model[0].attention.qkv.weight).__name__, "weights;", conversion)
