"""Draws a run's curves from metrics.jsonl: loss and accuracies (or AUC) over updates, and what its servers did."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.host import json_text
from trainer.pictures.figures import figure_of, save
from trainer.pictures.lettering import families
from trainer.run_folder.lives import read
from trainer.run_folder.points import read_points
from trainer.visible import printed

PANELS = (("loss", "loss"), ("perf/samples_per_s", "samples per second"), ("lr", "learning rate"))
A_RATE = "per second"
"""End of the names of panels with an axis from 0."""
ACCURACY = ("acc", "accuracy")
SERVED = (("pushes_per_s", "pushes per second"), ("mb_per_s", "MB per second"), ("rows", "rows of tables"))


def _points(run_dir: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Read every metric's (updates, values) from a run's metrics.jsonl."""
    series: dict[str, tuple[list[int], list[float]]] = {}
    for point in read_points(run_dir):
        for name, value in point["metrics"].items():
            steps, values = series.setdefault(name, ([], []))
            steps.append(point["step"])
            values.append(value)
    return series


def draw(run_dir: Path, title: str, curve: tuple[str, str] = ACCURACY) -> Path | None:
    """Draw ``curves.png`` in the run's folder; returns its path, or None if there is nothing to draw.

    Args:
        curve: the task's, see ``Task.curve``.
    """
    series = _points(run_dir)
    begun = tuple(life.first for life in read(run_dir)[1:])
    panels: list[Panel | None] = []
    for wanted, label in filter(any, (PANELS[0], curve, *PANELS[1:])):
        named = {name: s for name, s in series.items() if wanted in name and not name.endswith("_share")}
        panels.append(_lines(named, "update", label, begun, labelled=not any(panels)))
    return _saved(run_dir / "curves.png", title, panels)


def draw_servers(run_dir: Path, title: str) -> Path | None:
    """Draw ``servers.png``: what the parameter servers did, and the staleness of pushes; None without servers."""
    reports = [json_text.read(path) for path in sorted(run_dir.glob("server.*.json"))]
    if not reports:
        return None
    series = _points(run_dir)
    panels = []
    for wanted, label in SERVED:
        named = {n: _as_trained(s) for n, s in series.items() if n.startswith("server") and n.endswith(f"/{wanted}")}
        if wanted == "rows" and not any(any(values) for _, values in named.values()):
            named = {}  # a model without tables
        panels.append(_lines(named, "update of the first worker", label))
    stale = {f"server {s['server']}": {int(k): v for k, v in s["staleness"].items()} for s in reports}
    panels.append(_bars({name: counts for name, counts in stale.items() if counts}))
    return _saved(run_dir / "servers.png", title, panels)


def _as_trained(series: tuple[list[int], list[float]]) -> tuple[list[int], list[float]]:
    """The series without a second value after the last update, when workers push nothing."""
    steps, values = series
    rest = steps[-2:-1] == steps[-1:]
    return (steps[:-1], values[:-1]) if rest else series


SIDE, EDGE, FOOT, HEAD = 0.9, 0.25, 0.55, 0.75
"""Margins in inches: left (y axis), right, bottom (x axis), top (title of two lines)."""
Panel = Callable[[Any], None]
"""A function that draws a panel on an axis."""


def drawn(title: str, panels: Sequence[Panel | None]) -> Any:
    """Make the figure of a run's curves: the panels that are not None, two in a row; None if there are none."""
    there = [panel for panel in panels if panel is not None]
    if not there:
        return None
    rows = -(-len(there) // 2)
    wide, tall = 12, 3.5 * max(rows, 1.3)
    figure = figure_of((wide, tall), title, arranged=False)  # to arrange it would be to draw it twice more
    room = {"left": SIDE / wide, "right": 1 - EDGE / wide, "bottom": FOOT / tall, "top": 1 - HEAD / tall}
    grid = figure.add_gridspec(rows, 2, **room, wspace=0.2, hspace=0.32)
    for number, panel in enumerate(there):
        alone = number == len(there) - 1 and number % 2 == 0
        panel(figure.add_subplot(grid[number // 2, :] if alone else grid[number // 2, number % 2]))
    return figure


def _saved(path: Path, title: str, panels: Sequence[Panel | None]) -> Path | None:
    figure = drawn(title, panels)
    if figure is None:
        return None
    save(figure, path)
    return path


def _lines(
    series: Mapping[str, tuple[list[int], list[float]]],
    x: str,
    y: str,
    begun: Sequence[int] = (),
    labelled: bool = False,
) -> Panel | None:
    """A panel of named curves, with markers on those of validation; None without curves.

    Args:
        begun: updates from which the run went on, each a thin line; labelled: the legend says so.
    """
    series = {name: points for name, points in series.items() if any(math.isfinite(value) for value in points[1])}
    if not series:
        return None

    def panel(axis: Any) -> None:
        fonts = families(series)
        for name, (steps, values) in sorted(series.items()):
            pointed = name.startswith(("val/", "val_ema/", "test/")) or len(steps) == 1
            axis.plot(steps, values, label=printed(name).lstrip("_"), marker="o" if pointed else None, markersize=4)
        for number, step in enumerate(sorted(set(begun))):
            axis.axvline(
                step,
                label="resumed" if labelled and not number else None,
                color="0.4",
                linewidth=0.8,
                linestyle="--",
                zorder=1,
            )
        axis.set_xlabel(x)
        axis.set_ylabel(y)
        axis.xaxis.set_major_locator(_whole_numbers())
        if y.endswith(A_RATE):
            axis.set_ylim(0, 1.05 * axis.dataLim.y1 or 1)
        _widen(axis)
        axis.grid(alpha=0.3)
        for entry in axis.legend(prop={"family": fonts}).get_texts():
            entry.set_parse_math(False)

    return panel


def _bars(counts: Mapping[str, Mapping[int, int]]) -> Panel | None:
    """A panel of the pushes of each server by staleness; None if nothing was counted."""
    if not counts:
        return None

    def panel(axis: Any) -> None:
        width = 0.8 / len(counts)
        for number, (name, heights) in enumerate(counts.items()):
            aside = (number - (len(counts) - 1) / 2) * width
            axis.bar([place + aside for place in heights], list(heights.values()), width, label=name)
        axis.set_xlabel("staleness: updates between a pull and its push")
        axis.set_ylabel("pushes")
        axis.xaxis.set_major_locator(_whole_numbers())
        axis.yaxis.set_major_locator(_whole_numbers())
        _widen(axis)
        axis.legend()

    return panel


def _widen(axis: Any) -> None:
    """Show the neighbours of a single update or staleness, too."""
    left, right = axis.get_xlim()
    if right - left < 1.0:
        middle = round((left + right) / 2)
        axis.set_xlim(middle - 1, middle + 1)


def _whole_numbers() -> Any:
    """A matplotlib tick locator that marks whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True, min_n_ticks=1)
