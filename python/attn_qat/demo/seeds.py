"""All seeds. On the CPU several at a time, one thread each: faster than all cores on one small step.

The losses then do not depend on the number of cores either.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from rich import progress
from rich.console import Console

from .data import Corpus
from .model import BF16, ByteModel
from .train import Config, Losses, run_seed

COLUMNS = (
    progress.TextColumn("{task.description:<26}"),
    progress.BarColumn(bar_width=24),
    progress.TextColumn("{task.completed}/{task.total},"),
    progress.TimeRemainingColumn(),
    progress.TextColumn("left"),
)


def run_seeds(
    config: Config, corpus: Corpus, device: torch.device, console: Console, deadline: float
) -> tuple[list[Losses], dict[str, ByteModel]]:
    """Losses of the seeds in order, and the models of the first.

    After two seeds, starts none that at the pace of the others would end after `deadline` (time.monotonic).
    """
    workers = min(config.seeds, torch.get_num_threads()) if device.type == "cpu" else 1
    durations: list[float] = []
    models = [config.model(seed).to(device) for seed in range(config.seeds)]
    trained: dict[str, ByteModel] = {}

    def run(seed: int) -> Losses | None:
        started = time.monotonic()
        if seed >= 2 and durations and started + statistics.fmean(durations) > deadline:
            return None
        task = bar.add_task(f"seed {seed + 1}", total=config.steps_of_a_seed())

        def on_step(what: str, loss: float) -> None:
            bar.update(task, advance=1, description=f"seed {seed + 1}, {what}, loss {loss:.2f}")

        losses, branches = run_seed(config, corpus, seed, models[seed], on_step)
        durations.append(time.monotonic() - started)
        bar.remove_task(task)
        if seed == 0:
            trained.update(branches)
        console.print(seed_line(config, seed, losses))
        return losses

    console.print("Each seed: validation loss of the BF16 control, then cost of FP4 without>with QAT")
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        with progress.Progress(*COLUMNS, console=console, transient=True) as bar:
            with ThreadPoolExecutor(workers) as pool:
                runs = [losses for losses in pool.map(run, range(config.seeds)) if losses is not None]
    finally:
        torch.set_num_threads(threads)
    if len(runs) < config.seeds:
        console.print(f"Stopped after {len(runs)} of {config.seeds} seeds: --time-limit.")
    return runs, trained


def seed_line(config: Config, seed: int, losses: Losses) -> str:
    control = losses[BF16][BF16]
    costs = ", ".join(
        f"{r} {losses[BF16][r] - control:.4f}>{losses[r][r] - control:.4f}" for r in config.recipes
    )
    return f"{seed + 1}: BF16 {control:.4f}, {costs}"
