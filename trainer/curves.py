"""Pictures of a run: loss and accuracies (or AUC) over its updates, from metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PANELS = (("loss", "loss"), ("acc", "accuracy"), ("perf/samples_per_s", "samples per second"), ("lr", "learning rate"))
AUC = ("/auc", "AUC")


def points(run_dir: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Every metric's (updates, values)."""
    series: dict[str, tuple[list[int], list[float]]] = {}
    try:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        point = json.loads(line)
        for name, value in point["metrics"].items():
            steps, values = series.setdefault(name, ([], []))
            steps.append(point["step"])
            values.append(value)
    return series


def draw(run_dir: Path, title: str) -> Path | None:
    """``curves.png`` in the run's folder; None when there is nothing to draw."""
    series = points(run_dir)
    if not series:
        return None
    figure, axes = _panels(title)
    ranked = any(name.endswith("/auc") for name in series)
    for axis, (wanted, label) in zip(axes.flat, PANELS, strict=True):
        if wanted == "acc" and ranked:
            wanted, label = AUC
        named = {name: s for name, s in series.items() if wanted in name and not name.endswith("_share")}
        _lines(axis, named, "update", label)
    path = run_dir / "curves.png"
    figure.savefig(path, dpi=110)
    return path


def draw_servers(run_dir: Path, title: str) -> Path | None:
    """``servers.png``: what the parameter servers did over the run, and how stale the pushes were; None without servers."""
    told = [json.loads(path.read_text()) for path in sorted(run_dir.glob("server.*.json"))]
    if not told:
        return None
    figure, axes = _panels(title)
    series = points(run_dir)
    for axis, wanted in zip(axes.flat, ("pushes_per_s", "mb_per_s", "rows"), strict=False):
        named = {n: s for n, s in series.items() if n.startswith("server") and n.endswith(f"/{wanted}")}
        label = wanted.replace("_per_s", " per second").replace("mb", "MB").replace("_", " ")
        _lines(axis, named, "update of the first worker", label)
    for server in told:
        counts = {int(k): v for k, v in server["staleness"].items()}
        axes.flat[3].bar(list(counts), list(counts.values()), alpha=0.6, label=f"server {server['server']}")
    axes.flat[3].set_xlabel("staleness: updates between a pull and its push")
    axes.flat[3].set_ylabel("pushes")
    axes.flat[3].legend()
    path = run_dir / "servers.png"
    figure.savefig(path, dpi=110)
    return path


def figure_of(size: tuple[float, float], title: str) -> Any:
    """An empty figure of so many inches, without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    return figure


def _panels(title: str) -> tuple[Any, Any]:
    """A figure and its (2, 2) axes."""
    figure = figure_of((12, 7), title)
    return figure, figure.subplots(2, 2)


def _lines(axis: Any, series: dict[str, tuple[list[int], list[float]]], x: str, y: str) -> None:
    """Named curves in one panel, validation's with points."""
    for name, (steps, values) in sorted(series.items()):
        axis.plot(steps, values, label=name, marker="o" if name.startswith("val/") else None, markersize=4)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend()
