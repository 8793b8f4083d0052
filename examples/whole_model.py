"""An encoder of torch.nn trained in BF16, then evaluated and fine-tuned with FP4 attention.

python examples/whole_model.py [--device cuda]

The task, reversing a sequence, is nothing but attention. Loss in nats per token.
"""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import nn

import attn_qat

TOKENS, LENGTH, WIDTH = 64, 64, 128


class Reverser(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers=1, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens):
        return self.out(self.encoder(self.token(tokens) + self.place.weight))


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flip(1).flatten())


def train(model, steps, rate, device):
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(steps):
        loss_of(model, torch.randint(TOKENS, (32, LENGTH), device=device)).backward()
        optimiser.step()
        optimiser.zero_grad()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.manual_seed(0)
    held_out = torch.randint(TOKENS, (256, LENGTH), device=options.device)

    def evaluate(model):
        with torch.no_grad():
            return loss_of(model, held_out).item()

    plain = Reverser().to(options.device, torch.bfloat16)
    train(plain, options.steps, 2e-3, options.device)
    student = copy.deepcopy(plain)
    print(f"trained in BF16:                {evaluate(plain):.4f}")
    with attn_qat.convert(student, recipe="fp4", modules="encoder") as conversion:
        print(f"the same weights, FP4 attention: {evaluate(student):.4f}")
        train(student, options.steps // 2, 5e-4, options.device)
        print(f"fine-tuned with FP4 attention:   {evaluate(student):.4f}")
        print(conversion)
    train(plain, options.steps // 2, 5e-4, options.device)
    print(f"fine-tuned in BF16, as control:  {evaluate(plain):.4f}")


if __name__ == "__main__":
    main()
