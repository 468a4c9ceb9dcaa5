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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes: Any = figure.subplots(2, 2)
    ranked = any(name.endswith("/auc") for name in series)
    for axis, (wanted, label) in zip(axes.flat, PANELS, strict=True):
        if wanted == "acc" and ranked:
            wanted, label = AUC
        for name, (steps, values) in sorted(series.items()):
            if wanted in name and not name.endswith("_share"):
                marker = "o" if name.startswith("val/") else None
                axis.plot(steps, values, label=name, marker=marker, markersize=4)
        axis.set_xlabel("update")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    path = run_dir / "curves.png"
    figure.savefig(path, dpi=110)
    return path


def draw_servers(run_dir: Path, title: str) -> Path | None:
    """``servers.png``: what the parameter servers did over the run, and how stale the pushes were; None without servers."""
    told = [json.loads(path.read_text()) for path in sorted(run_dir.glob("server.*.json"))]
    if not told:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes: Any = figure.subplots(2, 2)
    series = points(run_dir)
    for axis, wanted in zip(axes.flat, ("pushes_per_s", "mb_per_s", "rows"), strict=False):
        for name, (steps, values) in sorted(series.items()):
            if name.startswith("server") and name.endswith(f"/{wanted}"):
                axis.plot(steps, values, label=name)
        axis.set_xlabel("update of the first worker")
        axis.set_ylabel(wanted.replace("_per_s", " per second").replace("mb", "MB").replace("_", " "))
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    for server in told:
        counts = {int(k): v for k, v in server["staleness"].items()}
        axes.flat[3].bar(list(counts), list(counts.values()), alpha=0.6, label=f"server {server['server']}")
    axes.flat[3].set_xlabel("staleness: updates between a pull and its push")
    axes.flat[3].set_ylabel("pushes")
    axes.flat[3].legend()
    path = run_dir / "servers.png"
    figure.savefig(path, dpi=110)
    return path
