"""Draws a validation's numbers: predictions over labels, and a table and a page of the worst samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.metrics.points import Points
from trainer.metrics.validation_file import Findings
from trainer.pictures.figures import figure_of, save
from trainer.pictures.lettering import drawable
from trainer.run_folder import csv_files

FILES = ("scatter.png", "mistakes.csv")
MOST_PANELS = 9
"""Numbers of a sample that are drawn; of more, the first."""
PANEL = 4.0
"""Inches of a panel."""


def file_names(which: str) -> tuple[str, ...]:
    """The names of the files about the last or the best validation."""
    return FILES if which == "last" else tuple(f"{which}_{name}" for name in FILES)


def draw(run_dir: Path, which: str, found: Findings, names: Sequence[str], title: str) -> list[Path]:
    """Draw the picture and write the table of a validation into the run's folder; returns their paths.

    Args:
        names: of the numbers; empty: they are called by their place.
    """
    points = Points.of(found.arrays)
    scatter, mistakes = (run_dir / name for name in file_names(which))
    columns = points.labels.shape[1]
    called = (
        list(names) if len(names) == columns else [f"value{n + 1}" if columns > 1 else "value" for n in range(columns)]
    )
    save(scatter_figure(points, called, title), scatter)
    rows: list[list[Any]] = [
        ["file", "split", "sample", *(f"{kind} {n}" for n in called for kind in ("label", "value"))]
    ]
    for place, number in enumerate(points.samples):
        pairs = zip(points.worst_labels[place].tolist(), points.worst_outputs[place].tolist(), strict=True)
        file = found.files[place] if place < len(found.files) else ""
        rows.append([file, found.split, number, *(f"{value:.8g}" for pair in pairs for value in pair)])
    csv_files.write(mistakes, rows)
    return [scatter, mistakes]


def scatter_figure(points: Points, names: Sequence[str], title: str) -> Any:
    """The figure of predictions over labels, a panel for each number; the worst samples are marked."""
    shown, fonts, _ = drawable(list(names)[:MOST_PANELS])
    across = min(3, len(shown))
    down = -(-len(shown) // across)
    figure = figure_of((PANEL * across + 1.0, PANEL * down + 0.6), title)
    axes = np.atleast_1d(figure.subplots(down, across)).ravel()
    for axis in axes[len(shown) :]:
        axis.set_axis_off()
    for column, (axis, name) in enumerate(zip(axes, shown, strict=False)):
        labels, outputs = points.labels[:, column], points.outputs[:, column]
        axis.plot(labels, outputs, ".", alpha=0.5, markersize=5, label=f"{len(labels)} samples")
        worst = points.worst_labels[:, column], points.worst_outputs[:, column]
        axis.plot(*worst, "x", color="tab:red", markersize=5, label="greatest errors")
        both = [*labels.tolist(), *outputs.tolist()] or [0.0]
        axis.axline((min(both), min(both)), slope=1, color="0.4", linewidth=0.8, linestyle="--", zorder=1)
        axis.set_xlabel(f"label: {name}", parse_math=False, fontfamily=fonts)
        axis.set_ylabel("prediction")
        axis.grid(alpha=0.3)
        if not column:
            axis.legend()
    return figure
