"""One seed of the experiment: training with BF16 attention, then one branch for each kind of attention.

Every branch sees the same batches in the same order and every evaluation the same windows, so differences
within a seed come from attention alone. The BF16 branch is the control: what more training gives without FP4.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from .data import Corpus
from .model import BF16, ByteModel

PRETRAINED = "pretrained"  # the model before it branches
# [attention it was fine-tuned with, or PRETRAINED][attention in evaluation]
Losses = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Config:
    seeds: int = 4
    steps: int = 1600  # of BF16 training
    fine_tune_steps: int = 400  # of each branch
    recipes: tuple[str, ...] = ("cudnn", "fp4", "fp4_qk")
    layers: int = 2
    width: int = 64
    heads: int = 1
    head_dim: int = 64
    hidden: int = 128
    context: int = 256
    batch: int = 4
    learning_rate: float = 8e-3
    fine_tune_learning_rate: float = 1e-3
    validation_windows: int | None = None  # None: all of the validation text

    def steps_of_a_seed(self) -> int:
        return self.steps + self.fine_tune_steps * (1 + len(self.recipes))

    def model(self, seed: int) -> ByteModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return ByteModel(
                width=self.width,
                layers=self.layers,
                heads=self.heads,
                head_dim=self.head_dim,
                hidden=self.hidden,
                context=self.context,
            )


def schedule(step: int, steps: int) -> float:
    """Factor of the learning rate: linear warm-up over 5% of the steps, then a cosine down to 5%."""
    warm_up = min(1.0, (step + 1) / (0.05 * steps))
    return warm_up * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(
    model: ByteModel,
    corpus: Corpus,
    kind: str,
    steps: int,
    learning_rate: float,
    config: Config,
    data_seed: int,
    on_step: Callable[[float], None],
) -> None:
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(data_seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * schedule(step, steps)
        x, y = (t.to(device) for t in corpus.batch(generator, config.batch, config.context))
        loss = model.loss(x, y, kind)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        on_step(loss.item())


@torch.no_grad()
def evaluate(model: ByteModel, corpus: Corpus, kind: str, config: Config) -> float:
    """Validation loss in nats per byte."""
    device = next(model.parameters()).device
    x, y = (t.to(device) for t in corpus.validation_windows(config.context, config.validation_windows))
    total = sum(model.loss(a, b, kind).item() * len(a) for a, b in zip(x.split(16), y.split(16), strict=True))
    return total / len(x)


def run_seed(
    config: Config, corpus: Corpus, seed: int, model: ByteModel, on_step: Callable[[str, float], None]
) -> tuple[Losses, dict[str, ByteModel]]:
    """Trains `model`, then the branches: (losses, models of the branches).

    After each step calls on_step(what is being trained, training loss). Draws nothing from torch's global
    generator, so seeds can run in threads beside one another.
    """
    kinds = (BF16, *config.recipes)
    train(
        model,
        corpus,
        BF16,
        config.steps,
        config.learning_rate,
        config,
        seed,
        lambda loss: on_step(BF16, loss),
    )
    losses = {PRETRAINED: {kind: evaluate(model, corpus, kind, config) for kind in kinds}}
    models = {}
    for kind in kinds:
        models[kind] = branch = copy.deepcopy(model)
        train(
            branch,
            corpus,
            kind,
            config.fine_tune_steps,
            config.fine_tune_learning_rate,
            config,
            1000 + seed,
            lambda loss, kind=kind: on_step(f"+ {kind}", loss),
        )
        evaluated = kinds if kind == BF16 else (BF16, kind)
        losses[kind] = {other: evaluate(branch, corpus, other, config) for other in evaluated}
    return losses, models
