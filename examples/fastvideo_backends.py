"""FastVideo's ATTN_QAT_TRAIN and ATTN_QAT_INFER: fine-tune a layer with FP4 attention, run it as deployed.

Runs in seconds on the GPU, or where there is none on the CPU, with or without fastvideo installed: without it the
backends are taken directly, as FastVideo would after its selection.
"""

import torch
from torch import nn

from attn_qat.integrations import fastvideo as qat

HEADS, HEAD_SIZE, LENGTH = 2, 64, 48


def select(name: str) -> type:
    """The backend class that FastVideo's selection gives for `name`."""
    try:
        qat.register(recipe="fp4")
    except ImportError:
        return {"ATTN_QAT_TRAIN": qat.AttnQatTrainBackend, "ATTN_QAT_INFER": qat.AttnQatInferBackend}[name]
    from fastvideo.attention import get_attn_backend
    from fastvideo.platforms import AttentionBackendEnum

    wanted = AttentionBackendEnum[name]
    return get_attn_backend(HEAD_SIZE, torch.bfloat16, (wanted,), requested=wanted)


class Attention(nn.Module):
    """Self-attention as FastVideo's video transformers have it: BLHD, an exchangeable implementation."""

    def __init__(self, backend: type):
        super().__init__()
        self.num_heads = self.num_kv_heads = HEADS
        self.head_size = HEAD_SIZE
        self.qkv = nn.Linear(HEADS * HEAD_SIZE, 3 * HEADS * HEAD_SIZE, dtype=torch.bfloat16)
        self.attn_impl = backend.get_impl_cls()(
            num_heads=HEADS, head_size=HEAD_SIZE, causal=False, softmax_scale=HEAD_SIZE**-0.5
        )

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3 * HEADS, HEAD_SIZE)).chunk(3, dim=2)
        return self.attn_impl.forward(q, k, v, None).flatten(2)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"  # the active one, of which the receipt speaks
    torch.manual_seed(0)
    layer = Attention(select("ATTN_QAT_TRAIN")).to(device)
    x, target = torch.randn(2, 4, LENGTH, HEADS * HEAD_SIZE, dtype=torch.bfloat16, device=device)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    for step in range(5):
        loss = nn.functional.mse_loss(layer(x).float(), target.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")

    with torch.no_grad():
        trained = layer(x)
        with qat.inference_layers(layer):
            deployed = layer(x)
    assert torch.equal(trained, deployed)
    print("ATTN_QAT_INFER gives the bits that ATTN_QAT_TRAIN trained with")
    print(qat.attn_qat_infer_receipt())

    select("ATTN_QAT_INFER")  # raises where the active device has no kernel


if __name__ == "__main__":
    main()
