"""losses.png and fidelity.png."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only, also where there is no display
from matplotlib import pyplot as plt  # noqa: E402

from .model import BF16  # noqa: E402
from .report import percent  # noqa: E402
from .summary import Comparison, sample  # noqa: E402
from .train import Losses  # noqa: E402

COLOURS = {"cudnn": "#d1495b", "fp4": "#00798c", "fp4_qk": "#b7791f"}
WITHOUT, WITH, GREY = "#b9c0c7", "#00798c", "#6b7680"
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e9ec",
    "axes.edgecolor": GREY,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "font.size": 10,
    "legend.frameon": False,
    "figure.dpi": 150,
}


def losses(path: Path, runs: list[Losses], comparisons: list[Comparison]) -> None:
    """Cost of FP4 by recipe, with and without QAT; a line is a seed. On the left, the noise between seeds."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.5, 4.4), layout="constrained")
        control = sample(runs, BF16, BF16)
        deviations = [value - control.mean for value in control.values]
        axes.scatter([0] * len(deviations), deviations, color=GREY, s=22, zorder=3)
        for i, c in enumerate(comparisons, start=1):
            ends = (i - 0.2, i + 0.2)
            for x, cost, colour in zip(ends, (c.cost_without, c.cost_with), (WITHOUT, WITH), strict=True):
                axes.bar(x, cost.mean, 0.36, color=colour, zorder=2)
                axes.annotate(
                    f"{cost.mean:.4f}",
                    (x, 0),
                    (0, 4),
                    textcoords="offset points",
                    ha="center",
                    color="white" if colour == WITH else "#333333",
                    fontsize=9,
                    zorder=5,
                )
            for pair in zip(c.cost_without.values, c.cost_with.values, strict=True):
                axes.plot(ends, pair, color="#333333", linewidth=0.8, marker="o", markersize=3.5, zorder=4)
        axes.axhline(0, color=GREY, linewidth=1)
        axes.set_xticks(
            range(len(comparisons) + 1),
            [
                "BF16 control\n(loss - mean)",
                *(f"{c.recipe}\nwon back {percent(c.share)}" for c in comparisons),
            ],
        )
        axes.grid(axis="x", visible=False)
        axes.set_ylabel("validation loss above BF16, nats per byte")
        axes.set_title(f"What FP4 attention costs, and what QAT gives back ({len(runs)} seeds)")
        handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in (WITHOUT, WITH)]
        handles.append(plt.Line2D([], [], color="#333333", linewidth=0.8, marker="o", markersize=3.5))
        axes.legend(
            handles,
            ["FP4 after BF16 training", "FP4 after QAT", "one seed"],
            loc="upper center",
            bbox_to_anchor=(0.5, -0.13),
            ncols=3,
        )
        figure.savefig(path)
        plt.close(figure)


def fidelity(path: Path, errors: dict[int, dict[str, float]]) -> None:
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.5, 4.4), layout="constrained")
        lengths = list(errors)
        for recipe in next(iter(errors.values())):
            values = [100 * errors[length][recipe] for length in lengths]
            axes.plot(lengths, values, marker="o", color=COLOURS.get(recipe, GREY), linewidth=2)
            axes.annotate(
                f"{recipe}  {values[-1]:.1f}%",
                (lengths[-1], values[-1]),
                (8, 3),
                textcoords="offset points",
                va="center",
                color=COLOURS.get(recipe, GREY),
                weight="bold",
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.minorticks_off()
        axes.set_ylim(-2, 105)
        axes.spines["bottom"].set_bounds(lengths[0], lengths[-1])
        axes.set_xlim(right=lengths[-1] * (lengths[-1] / lengths[0]) ** 0.22)
        axes.set_xlabel("keys")
        axes.set_ylabel("relative error of dV, %")
        axes.grid(axis="x", visible=False)
        axes.set_title("dV of a diffuse head: error of the FP4 recipes by number of keys")
        figure.savefig(path)
        plt.close(figure)
