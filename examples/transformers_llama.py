"""Train a tiny Llama with FP4 attention and generate with it, and compare the losses with sdpa's.

python examples/transformers_llama.py [--device cuda]
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from attn_qat.integrations.transformers import register

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cpu")
parser.add_argument("--steps", type=int, default=24)
options = parser.parse_args()

register("attn_qat", recipe="fp4_qk")
ids = (torch.arange(32) + torch.arange(0, 64, 8)[:, None]).remainder(64).to(options.device)


def train(attn_implementation: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation=attn_implementation,
    )
    model = LlamaForCausalLM(config).to(options.device, torch.bfloat16).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(options.steps):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    shown = ", ".join(f"{loss:.3f}" for loss in losses[:: max(1, options.steps // 8)])
    print(f"{attn_implementation:>8}: {shown}, last {losses[-1]:.3f}")
    return model.eval()


train("sdpa")
model = train("attn_qat")
prompt = ids[:1, :8]
out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
print(f"prompt {prompt[0].tolist()}, continued {out[0, 8:].tolist()}")
