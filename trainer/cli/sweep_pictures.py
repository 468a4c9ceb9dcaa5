"""Draws the pictures of a sweep's report as PNG files, for the sweep's run at its trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.cli import sweep_report
from trainer.cli.sweep_report import Job
from trainer.pictures.figures import figure_of, save
from trainer.visible import printed

PICTURES = ("sweep_curves.png", "sweep_parallel.png", "sweep_throughput.png", "sweep_importance.png")
JOB, BEST = "#8aa4bd", "#d9480f"
SIZE = (9.0, 5.0)
PAPER = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1}


def draw(folder: Path) -> list[str]:
    """Draw what the jobs of a sweep allow into its folder; returns the files' names. Older ones are removed."""
    for name in PICTURES:
        (folder / name).unlink(missing_ok=True)
    jobs, keys = sweep_report.found(folder)
    measured = [job for job in jobs if job.value is not None]
    if not measured or len({job.metric for job in measured}) > 1:
        return []
    metric = measured[0].metric
    best, is_compared = measured[0], bool(keys) and len(measured) > 1
    panels: list[tuple[bool, str, Callable[[Any], None]]] = [  # as PICTURES
        (any(job.curve for job in measured), f"{metric} over updates", lambda axis: _curves(axis, measured, metric)),
        (is_compared, "parallel coordinates", lambda axis: _parallel(axis, measured, keys)),
        (any(_has_rate(job) for job in jobs), "throughput", lambda axis: _throughput(axis, jobs, best)),
        (is_compared, "importance of the keys", lambda axis: _importance(axis, measured, keys)),
    ]
    drawn = []
    for name, (is_there, title, panel) in zip(PICTURES, panels, strict=True):
        if is_there:
            figure = figure_of(SIZE, f"Sweep {folder.name}: {title}")
            panel(figure.add_subplot())
            save(figure, folder / name)
            drawn.append(name)
    return drawn


def _has_rate(job: Job) -> bool:
    return job.rate is not None and job.batch is not None


def _curves(axis: Any, jobs: Sequence[Job], metric: str) -> None:
    """A curve for each job, the best one (the first) in front."""
    for number, job in reversed([*enumerate(jobs)]):
        if not job.curve:
            continue
        style = {"color": JOB, "alpha": 0.7} if number else {"color": BEST, "linewidth": 2.5}
        label = f"best: job {job.name}" if not number else "other jobs" if number == 1 else None
        axis.plot(*zip(*job.curve, strict=True), marker="o", markersize=3, label=label, **style)
    axis.set_xlabel("update")
    axis.set_ylabel(printed(metric))
    axis.grid(alpha=0.3)
    axis.legend()


def _parallel(axis: Any, jobs: Sequence[Job], keys: Mapping[str, bool]) -> None:
    """A line for each job over an axis for each key, and one for the objective."""
    axes, shares = sweep_report.coordinates(jobs, keys)
    for number in reversed(range(len(jobs))):
        style = {"color": JOB, "alpha": 0.6} if number else {"color": BEST, "linewidth": 2.5}
        axis.plot(range(len(axes)), [column[number] for column in shares], **style)
    for place, labels in enumerate(axes.values()):
        axis.axvline(place, color="0.3", linewidth=0.8)
        for row, label in enumerate(labels):
            share = row / (len(labels) - 1) if len(labels) > 1 else 0.5
            axis.text(place + 0.02, share, printed(label), fontsize=8, parse_math=False, bbox=PAPER)
    axis.set_xticks(range(len(axes)), [printed(key) for key in axes])
    axis.set_xlim(-0.1, len(axes) - 0.7)
    axis.set_yticks([])


def _throughput(axis: Any, jobs: Sequence[Job], best: Job) -> None:
    """A point for each job, from 0 samples per second on."""
    for job in sorted(jobs, key=lambda job: job is best):
        if _has_rate(job):
            label = f"best: job {job.name}" if job is best else None
            axis.scatter(job.batch, job.rate, s=50, color=BEST if job is best else JOB, label=label)
    axis.set_xlabel("samples of an update")
    axis.set_ylabel("samples per second")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend()


def _importance(axis: Any, jobs: Sequence[Job], keys: Mapping[str, bool]) -> None:
    """A bar from 0 to 1 for each key, the longest on top."""
    found = sorted(sweep_report.importance(jobs, keys).items(), key=lambda item: item[1])
    axis.barh([printed(key) for key, _ in found], [value for _, value in found], color=JOB)
    for row, (_, value) in enumerate(found):
        axis.text(value + 0.01, row, f"{value:.2f}", va="center")
    axis.set_xlim(0, 1.1)
    axis.set_xlabel("rank correlation with the objective, or share of its rank variance")
