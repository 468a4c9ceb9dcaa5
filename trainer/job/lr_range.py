"""What a learning-rate range test has found (Smith, 2017, arXiv:1506.01186): smoothed losses, suggestion, picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.pictures.figures import figure_of, save
from trainer.run_folder.points import read_points

PICTURE = "lr_find.png"
MEMORY = 0.9
"""Share of the smoothed loss that each update keeps; without the bias towards 0 of the first updates."""
FIRST = 10
"""Updates at the beginning in which no learning rate is suggested: their loss is hardly smoothed."""


@dataclass(frozen=True)
class Found:
    """The curve of a range test.

    Attributes:
        rates: learning rates. losses: of their updates, over all workers. smoothed: the same without noise.
        steepest: index at which the smoothed loss falls the fastest; None: it does not fall. least: of its least value.
    """

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    steepest: int | None
    least: int


def read(run_dir: Path, scale: float = 1.0) -> Found:
    """Read the curve from the run's ``metrics.jsonl``; rates are divided by ``scale`` (``optimizer.lr_scaling``)."""
    points: dict[int, tuple[float, float]] = {}
    for point in read_points(run_dir):
        values = point["metrics"]
        if "train/loss" in values and "lr" in values:
            points.setdefault(point["step"], (values["lr"] / scale, values["train/loss"]))
    return found([rate for rate, _ in points.values()], [loss for _, loss in points.values()])


def found(rates: Sequence[float], losses: Sequence[float]) -> Found:
    """Smooth the losses and find where they fall the fastest by the logarithm of the rate."""
    pairs = [(rate, loss) for rate, loss in zip(rates, losses, strict=True) if math.isfinite(loss)]
    smoothed, mean = [], 0.0
    for number, (_, loss) in enumerate(pairs, 1):
        mean = MEMORY * mean + (1 - MEMORY) * loss
        smoothed.append(mean / (1 - MEMORY**number))
    kept = [rate for rate, _ in pairs]
    least = min(range(len(smoothed)), key=smoothed.__getitem__, default=0)
    slopes = {
        number: (smoothed[number] - smoothed[number - 1]) / math.log(kept[number] / kept[number - 1])
        for number in range(FIRST, least + 1)
    }
    steepest = min(slopes, key=slopes.__getitem__, default=None)
    if steepest is not None and slopes[steepest] >= 0:
        steepest = None
    return Found(kept, [loss for _, loss in pairs], smoothed, steepest, least)


def draw(run_dir: Path, title: str, curve: Found) -> Path:
    """Draw ``lr_find.png`` in the run's folder; returns its path."""
    figure = figure_of((9, 5), title)
    axis = figure.add_subplot()
    axis.plot(curve.rates, curve.losses, color="0.75", linewidth=0.8, label="loss of each update")
    axis.plot(curve.rates, curve.smoothed, color="C0", linewidth=2, label="smoothed")
    if curve.steepest is not None:
        rate = curve.rates[curve.steepest]
        label = f"suggestion {rate:.2g}: the loss falls the fastest"
        axis.axvline(rate, color="C2", linestyle="--", label=label)
    if curve.smoothed:
        axis.plot(curve.rates[curve.least], curve.smoothed[curve.least], "o", color="C3", label="least smoothed loss")
        low, high = min(curve.smoothed), max(curve.smoothed[: curve.least + 1])
        axis.set_ylim(low - 0.1 * (high - low or 1.0), high + 0.5 * (high - low or 1.0))
    axis.set_xscale("log")
    axis.set_xlabel("optimizer.lr")
    axis.set_ylabel("training loss")
    axis.grid(alpha=0.3)
    axis.legend()
    save(figure, run_dir / PICTURE)
    return run_dir / PICTURE
