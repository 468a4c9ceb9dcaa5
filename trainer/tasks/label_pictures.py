"""Draws a validation's labels: F1 and average precision of each, as a picture and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.metrics.label_rankings import LabelCounts
from trainer.metrics.validation_file import Findings
from trainer.pictures.figures import figure_of, save
from trainer.pictures.lettering import Ruler, drawable
from trainer.run_folder import csv_files

FILES = ("labels.png", "per_label.csv")
MOST_NAMES = 60
"""Labels that are drawn; of more, the most frequent."""
NAME_INCHES = 2.5


def file_names(which: str) -> tuple[str, ...]:
    """The names of the files about the last or the best validation."""
    return FILES if which == "last" else tuple(f"{which}_{name}" for name in FILES)


def draw(run_dir: Path, which: str, found: Findings, names: Sequence[str], title: str) -> list[Path]:
    """Draw the picture and write the table of a validation into the run's folder; returns their paths.

    Args:
        names: of the labels; empty: they are called by their numbers.
    """
    counts = LabelCounts(**found.arrays)
    picture, table = (run_dir / name for name in file_names(which))
    called = list(names) if len(names) == len(counts.labels) else [str(number) for number in range(len(counts.labels))]
    rows: list[list[Any]] = [
        ["label", "name", "samples", "hits", "guesses", "recall", "precision", "f1", "average_precision"]
    ]
    for number, (hits, wanted, guesses, precision) in enumerate(
        zip(counts.hits, counts.labels, counts.guesses, counts.precisions, strict=True)
    ):
        shares = _share(hits, wanted), _share(hits, guesses), _share(2 * hits, wanted + guesses)
        known = f"{precision:.6f}" if np.isfinite(precision) else ""
        rows.append([number, called[number], *map(int, (wanted, hits, guesses)), *shares, known])
    csv_files.write(table, rows)
    save(labels_figure(counts, called, title), picture)
    return [picture, table]


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.6f}" if whole else ""


def labels_figure(counts: LabelCounts, names: Sequence[str], title: str) -> Any:
    """The figure of each label's F1 and average precision, the most frequent label first."""
    order = np.argsort(-counts.labels, kind="stable")[:MOST_NAMES]
    shown, fonts, _ = drawable([f"{names[number]} ({int(counts.labels[number])})" for number in order])
    together = np.maximum(counts.labels + counts.guesses, 1)[order]
    figure = figure_of((9.0, 1.6 + 0.3 * len(order)), title)
    axis, places, ruler = figure.subplots(), np.arange(len(order)), Ruler(10, fonts)
    axis.barh(places - 0.2, np.nan_to_num(counts.precisions[order]), 0.4, label="average precision")
    axis.barh(places + 0.2, 2 * counts.hits[order] / together, 0.4, label="F1")
    called = [ruler.cut(name, NAME_INCHES) for name in shown]
    axis.set_yticks(places, called, parse_math=False, fontfamily=fonts, fontsize=10)
    axis.invert_yaxis()
    axis.set_xlim(0, 1)
    axis.set_xlabel("share; in brackets: samples with the label")
    axis.grid(alpha=0.3, axis="x")
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure
