"""`python -m attn_qat demo`: options, progress, and what is written where."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from .. import build_info
from ..autograd import attention
from ..recipe import Recipe
from . import data, fidelity
from .summary import Comparison, between, compare, seed_noise
from .train import Config, Losses

QUICK = Config(seeds=2, steps=12, fine_tune_steps=6, context=64, validation_windows=16)
QUICK_LENGTHS = (256, 1024)


def add_parser(commands) -> argparse.ArgumentParser:
    defaults = Config()
    parser = commands.add_parser(
        "demo",
        help="train a small model and measure what FP4 attention costs and what QAT gives back",
        description="Trains a small byte-level transformer with BF16 attention, evaluates it with FP4 and "
        "fine-tunes it with each recipe and, as control, with BF16. Measures the error of dV by key count.",
    )
    add = parser.add_argument
    add("--seeds", type=positive, help=f"number of repetitions (default {defaults.seeds})")
    add("--steps", type=positive, help=f"steps of BF16 training (default {defaults.steps})")
    add("--fine-tune-steps", type=positive, help=f"steps of each branch (default {defaults.fine_tune_steps})")
    add(
        "--recipes",
        nargs="+",
        choices=[str(r) for r in Recipe],
        metavar="RECIPE",
        help=f"among {', '.join(map(str, Recipe))} (default: all)",
    )
    add(
        "--out",
        type=Path,
        default=Path("attn-qat-demo"),
        metavar="DIR",
        help="where results go (default %(default)s)",
    )
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default %(default)s)")
    add("--text", type=Path, nargs="+", default=[], metavar="FILE", help="train on these files instead")
    add(
        "--time-limit",
        type=positive,
        default=240,
        metavar="SECONDS",
        help="start no further seed that would end later, after two (default %(default)s)",
    )
    add(
        "--quick",
        action="store_true",
        help="a few steps, to see that everything runs; the numbers mean nothing",
    )
    return parser


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, takes a whole number from 1 on")
    return value


def configure(options: argparse.Namespace) -> Config:
    config = QUICK if options.quick else Config()
    given = {name: getattr(options, name) for name in ("seeds", "steps", "fine_tune_steps", "recipes")}
    if given["recipes"]:
        given["recipes"] = tuple(dict.fromkeys(given["recipes"]))
    return replace(config, **{name: value for name, value in given.items() if value})


def choose_device(name: str, recipes: tuple[str, ...]) -> tuple[torch.device, str]:
    """The device and a line about it. `auto`: the GPU, or the CPU and why attention fails on the GPU."""
    if name != "auto":
        try:
            return torch.empty(0, device=name).device, name
        except (RuntimeError, AssertionError) as error:
            raise SystemExit(f"attn-qat demo: --device {name}: {str(error).splitlines()[0]}") from None
    if not torch.cuda.is_available():
        return torch.device("cpu"), f"cpu ({torch.get_num_threads()} threads)"
    x = torch.ones(1, 1, 16, Config.head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    try:
        for recipe in recipes:
            attention(x, x, x, is_causal=True, recipe=recipe).sum().backward()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        gpu, reason = torch.cuda.get_device_name(), str(error).strip().splitlines()[0]
        return torch.device("cpu"), f"cpu (attention does not run on {gpu}: {reason})"
    return torch.device("cuda"), torch.cuda.get_device_name()


def run(options: argparse.Namespace) -> int:
    missing = [name for name in ("rich", "matplotlib") if find_spec(name) is None]
    if missing:
        raise SystemExit(f"attn-qat demo needs {' and '.join(missing)}: pip install 'attn-qat[demo]'")
    from rich.console import Console

    from . import plot, report
    from .seeds import run_seeds

    started = time.monotonic()
    config, console = configure(options), Console(highlight=False)
    corpus = data.load(options.text)
    if min(len(corpus.train), len(corpus.validation)) <= config.context:
        raise SystemExit(
            f"attn-qat demo: --text gives {len(corpus.train):,} bytes to train and "
            f"{len(corpus.validation):,} to validate; both must exceed {config.context}"
        )
    device, device_line = choose_device(options.device, config.recipes)
    options.out.mkdir(parents=True, exist_ok=True)
    parameters = sum(p.numel() for p in config.model(0).parameters())
    report.describe(console, config, corpus, parameters, device_line)

    lengths = QUICK_LENGTHS if options.quick else fidelity.LENGTHS
    errors = {length: fidelity.dv_error(length, tuple(map(str, Recipe)), device) for length in lengths}
    report.print_fidelity(console, errors)

    runs, models = run_seeds(config, corpus, device, console, started + options.time_limit)
    comparisons = [compare(runs, recipe) for recipe in config.recipes]
    report.print_losses(console, config, runs)
    report.print_comparisons(console, comparisons)
    for line in notes(options, runs, comparisons):
        console.print(line)

    plot.losses(options.out / "losses.png", runs, comparisons)
    plot.fidelity(options.out / "fidelity.png", errors)
    torch.save({kind: model.state_dict() for kind, model in models.items()}, options.out / "models.pt")
    elapsed = time.monotonic() - started
    results = {
        "config": asdict(config),
        "text": {
            "source": corpus.source,
            "licence": corpus.licence,
            "sha256": corpus.sha256,
            "train_bytes": len(corpus.train),
            "validation_bytes": len(corpus.validation),
        },
        "environment": {"device": device_line, "torch": torch.__version__, "commit": build_info()["commit"]},
        "losses": runs,
        "comparisons": {c.recipe: c.as_dict() for c in comparisons},
        "dv_error": errors,
        "seconds": elapsed,
    }
    (options.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    console.print(
        f"{elapsed:.0f} s. Wrote losses.png, fidelity.png, results.json and models.pt (seed 0) "
        f"to {options.out}/"
    )
    return 0


def notes(options: argparse.Namespace, runs: list[Losses], comparisons: list[Comparison]) -> list[str]:
    from .report import CAUSAL_NOTE, SIZE_NOTE

    lines = [c.verdict for c in comparisons] + [seed_noise(runs, comparisons)]
    by_recipe = {c.recipe: c for c in comparisons}
    if {Recipe.CUDNN, Recipe.FP4} <= by_recipe.keys():
        lines.append(between(by_recipe[Recipe.CUDNN], by_recipe[Recipe.FP4]))
    if any(c.recipe == Recipe.FP4 for c in comparisons):
        lines.append(CAUSAL_NOTE)
    lines.append(
        "--quick: these models are not trained; the losses mean nothing." if options.quick else SIZE_NOTE
    )
    return lines
