"""What the losses say: differences within each seed, their spread, and sentences computed from them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from .model import BF16
from .train import PRETRAINED, Losses

# Two-sided 95% quantile of Student's t by degrees of freedom; the last one serves (safely) for more.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Sample:
    """One number for each seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float:
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% confidence interval of the mean; None for one seed, which says nothing about noise."""
        n = len(self.values)
        if n < 2:
            return None
        half = T95[min(n - 2, len(T95) - 1)] * self.std / n**0.5
        return self.mean - half, self.mean + half

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + (f"±{self.std:.4f}" if len(self.values) > 1 else "")

    def as_dict(self) -> dict:
        return {"mean": self.mean, "std": self.std, "interval95": self.interval, "values": list(self.values)}


@dataclass(frozen=True)
class Comparison:
    """A recipe against the BF16 control, in nats per byte, paired by seed."""

    recipe: str
    cost_pretrained: Sample  # FP4 minus BF16 evaluation of the model before it branches
    cost_without: Sample  # the same of the control: as many steps as QAT, but without FP4
    cost_with: Sample  # model fine-tuned with the recipe, evaluated with it, minus the control in BF16
    won_back: Sample  # cost_without - cost_with

    @property
    def share(self) -> float | None:
        """The part of the cost that was won back; None where the cost is not distinguishable from 0."""
        interval = self.cost_without.interval
        return self.won_back.mean / self.cost_without.mean if interval and interval[0] > 0 else None

    @property
    def verdict(self) -> str:
        seeds, cost = f"over {len(self.won_back.values)} seeds", f"{self.cost_without.mean:.4f} nats per byte"
        if self.won_back.interval is None:
            return f"{self.recipe}: one seed says nothing about noise: no conclusion."
        if self.share is None:
            return f"{self.recipe}: {seeds}, the cost of FP4 ({cost}) is not above 0 beyond noise."
        low, high = self.won_back.interval
        if low > 0:
            conclusion = "more than the noise"
        else:
            conclusion = "QAT made it worse" if high < 0 else "not distinguishable from 0 at this size"
        return (
            f"{self.recipe}: FP4 costs {cost}; QAT won back {self.won_back.mean:.4f} ({self.share:.0%}), "
            f"95% interval {low:.4f} to {high:.4f} {seeds}: {conclusion}."
        )

    def as_dict(self) -> dict:
        names = ("cost_pretrained", "cost_without", "cost_with", "won_back")
        return {name: getattr(self, name).as_dict() for name in names} | {
            "share": self.share,
            "verdict": self.verdict,
        }


def sample(runs: list[Losses], trained: str, evaluated: str) -> Sample:
    return Sample(tuple(run[trained][evaluated] for run in runs))


def paired(a: Sample, b: Sample) -> Sample:
    return Sample(tuple(x - y for x, y in zip(a.values, b.values, strict=True)))


def compare(runs: list[Losses], recipe: str) -> Comparison:
    control = sample(runs, BF16, BF16)
    without = paired(sample(runs, BF16, recipe), control)
    trained = paired(sample(runs, recipe, recipe), control)
    return Comparison(
        recipe=recipe,
        cost_pretrained=paired(sample(runs, PRETRAINED, recipe), sample(runs, PRETRAINED, BF16)),
        cost_without=without,
        cost_with=trained,
        won_back=paired(without, trained),
    )


def between(a: Comparison, b: Comparison) -> str:
    """Whether two recipes, each trained and evaluated with itself, end at different losses."""
    difference = paired(a.cost_with, b.cost_with)
    if difference.interval is None:
        return f"{a.recipe} against {b.recipe}: needs two seeds."
    low, high = difference.interval
    conclusion = (
        "not distinguishable here" if low <= 0 <= high else f"{(b if low > 0 else a).recipe} is lower here"
    )
    return (
        f"{a.recipe} against {b.recipe}: their losses after QAT differ by {difference.mean:.4f}, "
        f"95% interval {low:.4f} to {high:.4f}: {conclusion}."
    )


def seed_noise(runs: list[Losses], comparisons: list[Comparison]) -> str:
    """How the effect compares with the spread of unpaired runs."""
    spread = sample(runs, BF16, BF16).std
    if len(runs) < 2 or not comparisons:
        return "Seed noise: not measured (it takes two seeds and a recipe)."
    costs = [c.cost_without.mean / spread for c in comparisons]
    gains = [c.won_back.mean / spread for c in comparisons]
    text = (
        f"Seed noise: the BF16 loss itself has a standard deviation of {spread:.4f} over {len(runs)} seeds. "
        f"The cost of FP4 is {span(costs)} times that, the gain of QAT {span(gains)} times."
    )
    if any(
        c.share and c.won_back.interval[0] > 0 and gain < 2
        for c, gain in zip(comparisons, gains, strict=True)
    ):
        text += (
            " Only the comparison within a seed shows such a gain: its branches start from one model and see "
            "the same batches."
        )
    return text


def span(values: list[float]) -> str:
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low} to {high}"
