"""A tiny Wan video transformer that learns to denoise, with native attention and with FP4 self-attention.

python examples/diffusers_wan.py [--device cuda]
"""

import argparse
import copy

import torch
from diffusers import WanTransformer3DModel

from attn_qat.integrations.diffusers import register, set_attention

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cpu")
parser.add_argument("--steps", type=int, default=16)
options = parser.parse_args()

torch.manual_seed(0)
native = WanTransformer3DModel(
    patch_size=(1, 2, 2),
    num_attention_heads=2,
    attention_head_dim=64,
    in_channels=4,
    out_channels=4,
    text_dim=32,
    freq_dim=32,
    ffn_dim=256,
    num_layers=2,
    rope_max_seq_len=32,
)
native = native.to(options.device)
fp4 = copy.deepcopy(native)

register("attn_qat", recipe="fp4")
print("FP4 attention in", set_attention(fp4, "attn_qat", modules="blocks.*.attn1"))

# Flow matching: from a mixture of a clip and noise, predict noise - clip. Clips are waves, the text zeros.
frames = torch.linspace(0, 6.28, 4)[:, None, None] + torch.linspace(0, 6.28, 16)[:, None]
clips = torch.stack([(frames + phase).sin().expand(4, 4, 16, 16) for phase in (0.0, 1.0, 2.0, 3.0)])


def train(model):
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(options.steps):
        noise, time = (
            torch.randn(clips.shape, generator=generator),
            torch.rand(len(clips), generator=generator),
        )
        mixed = clips.lerp(noise, time[:, None, None, None, None])
        inputs = (mixed, 1000 * time, torch.zeros(len(clips), 8, 32), noise - clips)
        latents, timestep, text, target = (x.to(options.device) for x in inputs)
        with torch.autocast(latents.device.type, torch.bfloat16):
            out = model(latents, timestep, text, return_dict=False)[0]
        loss = (out.float() - target).square().mean()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses


for name, model in (("native", native), ("attn_qat", fp4)):
    print(f"{name:>8}: " + ", ".join(f"{loss:.3f}" for loss in train(model)[:: max(1, options.steps // 8)]))
