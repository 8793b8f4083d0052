"""Tables for the terminal and results.json."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from .data import Corpus
from .fidelity import HEAD_DIM, QUERIES
from .model import BF16
from .summary import Comparison, sample
from .train import PRETRAINED, Config, Losses

CAUSAL_NOTE = (
    "Recipe fp4 in a causal model: the scale of a V block depends on up to 15 later bytes, so its losses "
    "above see a little of the future. fp4_qk leaves V in BF16 and does not: use it for causal models."
)
SIZE_NOTE = "So small a model says nothing about the losses of a large one."


def describe(console: Console, config: Config, corpus: Corpus, parameters: int, device: str) -> None:
    console.print(
        f"Text: {corpus.source}, licence {corpus.licence}: {len(corpus.train):,} bytes to train, "
        f"{len(corpus.validation):,} to validate, no paragraph in both."
    )
    console.print(
        f"Model: {parameters:,} parameters, {config.layers} layers, width {config.width}, "
        f"{config.heads} head(s) of {config.head_dim}, {config.context} bytes of context, on {device}. "
        f"{config.seeds} seeds: {config.steps} steps with BF16 attention, then {config.fine_tune_steps} "
        f"with each of {', '.join((BF16, *config.recipes))}, {config.batch * config.context} bytes a step."
    )


def new_table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def print_fidelity(console: Console, errors: dict[int, dict[str, float]]) -> None:
    recipes = list(next(iter(errors.values())))
    table = new_table("keys", *recipes)
    for length, row in errors.items():
        table.add_row(f"{length:,}", *(f"{row[recipe]:.1%}" for recipe in recipes))
    console.print(
        f"\nRelative error of dV in a diffuse head: Q, K, V, dO unit normal, {QUERIES:,} queries, "
        f"head dim {HEAD_DIM}"
    )
    console.print(table)


def print_losses(console: Console, config: Config, runs: list[Losses]) -> None:
    kinds = (BF16, *config.recipes)
    table = new_table("trained with", *(f"eval {kind}" for kind in kinds))
    for trained in (PRETRAINED, *kinds):
        cells = [str(sample(runs, trained, kind)) if kind in runs[0][trained] else "" for kind in kinds]
        table.add_row(BF16 if trained == PRETRAINED else f"+ {trained}", *cells)
    console.print(
        f"\nValidation loss, nats per byte, mean±standard deviation of {len(runs)} seed(s): {config.steps} "
        f"steps with BF16 attention, then (+) {config.fine_tune_steps} more"
    )
    console.print(table)


def print_comparisons(console: Console, comparisons: list[Comparison]) -> None:
    table = new_table("recipe", "without QAT", "with QAT", "won back", "95% interval", "seeds")
    for c in comparisons:
        interval = "{:.4f} to {:.4f}".format(*c.won_back.interval) if c.won_back.interval else "needs 2 seeds"
        won = sum(value > 0 for value in c.won_back.values)
        table.add_row(
            c.recipe,
            str(c.cost_without),
            str(c.cost_with),
            f"{c.won_back.mean:.4f} ({percent(c.share)})",
            interval,
            f"{won}/{len(c.won_back.values)}",
        )
    console.print(
        "Cost of FP4 attention: validation loss above that of '+ bf16' evaluated in BF16, paired by seed.\n"
        "QAT: fine-tuned with the recipe it is evaluated with; seeds: where that helped."
    )
    console.print(table)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
