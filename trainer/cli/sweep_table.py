"""The results of a sweep as a table: on the screen, in sweep.csv, and as the description of its MLflow run."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.cli.last_lines import shown
from trainer.cli.sweep_objective import Objective
from trainer.errors import PREEMPTED, PRUNED
from trainer.job.result import Result
from trainer.metrics.best import falls
from trainer.run_folder import csv_files
from trainer.run_folder.reset_files import POINTS
from trainer.terminal.screen import Screen
from trainer.wording import counted

METRICS = ("val/loss", "val/acc1", "val/acc5", "val/auc", "train/loss")
SPARE = ("val/acc5", "train/loss", "val/loss", "val/acc1", "val/auc")
"""Columns that a narrow terminal leaves out, in this order; the watched metric has its own column."""
NOT_STARTED = "not started"
PAUSED = "paused"
"""Status of a job that waits at its rung, and may go on when the sweep does."""
MOST_FOLDERS = 6
"""Most folders of jobs that the last line names."""


@dataclass(frozen=True)
class Row:
    """One job's row in a sweep's table: its overrides, its result, and the name of its watched metric.

    Attributes:
        overrides: without secrets. result: of the job. watched: the metric that sorts the jobs.
        objectives: all metrics by which the jobs are compared. values: the best of each, by metric.
    """

    overrides: tuple[str, ...]
    result: Result
    watched: str = ""
    objectives: tuple[Objective, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)

    @property
    def best(self) -> float | None:
        """The best value of this job's watched metric; None: it has none."""
        return self.value(self.watched)

    def value(self, metric: str) -> float | None:
        """The best value of a metric; None: it was not measured."""
        value = self.values.get(metric, self.result.best.get(metric))
        return None if value is None or math.isnan(value) else value

    @property
    def is_less_better(self) -> bool:
        """Whether less of the watched metric is better."""
        return self.objectives[0].is_less_better if self.objectives else falls(self.watched)


def waiting(overrides: Iterable[str]) -> Row:
    """The row of a job that was never started."""
    return Row(tuple(overrides), Result(NOT_STARTED, ""))


def best_of(jobs: Sequence[Row]) -> int | None:
    """The index of the sweep's job with the best watched metric; None if there is none, or if the metrics differ."""
    done = [(job.best, number) for number, job in enumerate(jobs) if job.best is not None]
    watched = {job.watched for job in jobs if job.best is not None}
    if len(watched) != 1 or not done:
        return None
    is_less_better = next(job.is_less_better for job in jobs if job.best is not None)
    value = (min if is_less_better else max)(value for value, _ in done)
    return next(number for found, number in done if found == value)


def front(jobs: Sequence[Row]) -> list[int]:
    """The jobs that are the best; of several objectives those that no other job is better than in all of them."""
    best = best_of(jobs)
    if best is None or len(wanted := jobs[best].objectives) < 2:
        return [] if best is None else [best]
    scores: dict[int, list[float]] = {}
    for number, job in enumerate(jobs):
        values = [(one, job.value(one.metric)) for one in wanted]
        if all(value is not None for _, value in values):
            scores[number] = [value if one.is_less_better else -value for one, value in values if value is not None]
    return [
        number
        for number, own in scores.items()
        if not any(other != own and all(a <= b for a, b in zip(other, own, strict=True)) for other in scores.values())
    ]


def in_order(jobs: Sequence[Row]) -> list[int]:
    """The numbers of the jobs, the best ones first, and those without a value last."""

    are_comparable = best_of(jobs) is not None

    def place(number: int) -> tuple[bool, float, int]:
        job = jobs[number]
        value = job.best
        if value is None or not are_comparable:
            return True, 0.0, number
        return False, value if job.is_less_better else -value, number

    return sorted(range(len(jobs)), key=place)


def _table(jobs: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return a sweep's table: column names, and a row of cells for each job (overrides, status, metrics, seconds)."""
    metrics = [m for m in METRICS if any(m in job.result.metrics for job in jobs)]
    compared = [name for job in jobs for name in (job.watched, *(one.metric for one in job.objectives))]
    watched = sorted({name for name in compared if any(job.value(name) is not None for job in jobs)})
    columns = ["job", "overrides", "status", *metrics, *(f"best {name}" for name in watched if name), "seconds"]
    common = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    rows = []
    for number, job in enumerate(jobs):
        differing = " ".join(o for o in job.overrides if o not in common)
        values = [f"{job.result.metrics[m]:.4f}" if m in job.result.metrics else "" for m in metrics]
        best = [_number(job.value(name)) for name in watched if name]
        seconds = "" if job.result.status == NOT_STARTED else f"{job.result.seconds:.1f}"
        rows.append([str(number), differing, job.result.status, *values, *best, seconds])
    return columns, rows


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if abs(value) >= 1e-3 or not value else f"{value:.3g}"


def write(jobs: Sequence[Row], folder: Path) -> Path:
    """Write the sweep's table as ``sweep.csv`` into its folder; returns the path."""
    columns, rows = _table(jobs)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sweep.csv"
    csv_files.write(path, [columns, *rows], private=True)
    return path


def note(name: str, jobs: Sequence[Row], swept: Collection[str], repeat: str, folder: Path) -> str:
    """A sweep's table in Markdown, with its best job and its command: the description of its MLflow run."""
    columns, rows = _table(jobs)
    best = best_of(jobs)
    ended = [
        status
        for status in ("done", PRUNED, "submitted", "failed", "killed", PREEMPTED, PAUSED, NOT_STARTED)
        if any(row[2] == status for row in rows)
    ]
    counts = ", ".join(f"{sum(row[2] == status for row in rows)} {status}" for status in ended)
    lines = []
    if best is not None:
        job, differing = jobs[best], rows[best][1]
        lines += [f"**Best: job {_linked(str(best), job)}, `{differing}`: {job.watched} {job.best:.5f}**", ""]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for number, (job, row) in enumerate(zip(jobs, rows, strict=True)):
        cells = [_linked(row[0], job), *(_cell(value) for value in row[1:])]
        lines.append("| " + " | ".join(f"**{cell}**" if cell and number == best else cell for cell in cells) + " |")
    swept_keys = ", ".join(f"`{key}`" for key in sorted(swept))
    lines += ["", f"{name}: sweep of {counted(len(jobs), 'job')} over {swept_keys}. {counts}."]
    return "\n".join([*lines, "", "Repeat it:", "", "```", repeat, "```", "", f"Files: `{folder}`"])


def _linked(text: str, job: Row) -> str:
    """The text as a link to the job's run on MLflow's page."""
    result = job.result
    known = result.run_id is not None and bool(result.experiment_id)
    return f"[{text}](#/experiments/{result.experiment_id}/runs/{result.run_id})" if known else text


def leave_best(jobs: Sequence[Row], folder: Path) -> None:
    """Write the best job's metric as a point of the sweep's own run: MLflow's list shows it in the jobs' column.

    Its step is the job's number, or a higher one after points of an earlier life: the list shows the highest step.
    """
    best = best_of(jobs)
    if best is None:
        return
    path = folder / POINTS
    before = [json.loads(line).get("step", 0) for line in path.read_text().splitlines()] if path.is_file() else []
    step = max([best, *(step + 1 for step in before)])
    point = {"step": step, "time": int(time.time() * 1000), "metrics": {jobs[best].watched: jobs[best].best}}
    with path.open("a") as points:
        points.write(json.dumps(point) + "\n")


def _cell(value: str) -> str:
    return value.replace("\\", "\\\\").replace("|", "\\|").replace("*", "\\*").replace("\n", " ")


def show_sweep(jobs: Sequence[Row], sweep_dir: Path, subdirs: Sequence[str]) -> None:
    """Print the table of a sweep's jobs and metrics, and write it as sweep.csv.

    Args:
        subdirs: the jobs' folders, relative to the sweep's.
    """
    columns, rows = _table(jobs)
    spare = [columns.index(name) for name in SPARE if name in columns]
    best, order = front(jobs), in_order(jobs)
    marked = [[f"{'*' * (number in best)}{rows[number][0]}", *rows[number][1:]] for number in order]
    out = Screen().rows("Sweep", columns, marked, columns.index("overrides"), spare)
    write(jobs, sweep_dir)
    if best and (first := jobs[best[0]]).result.run_dir:
        named = f"{first.watched} {first.best:.5f}" if len(best) == 1 else f"none is better in all of {len(best)} jobs"
        evaluated = f"python -m trainer eval {shown(Path(first.result.run_dir))}"
        Screen().print(f"best: job {', '.join(map(str, best))} ({named}); {evaluated}")
    more = f", with {', '.join(out)}" if out else ""
    Screen().print(f"jobs are in {_folders(sweep_dir, subdirs)}; the table in {shown(sweep_dir / 'sweep.csv')}{more}")


def _folders(sweep_dir: Path, subdirs: Sequence[str]) -> str:
    """The jobs' folders for a shell: all, or of many the first and the last ones."""
    names = list(subdirs) if len(subdirs) <= MOST_FOLDERS else [*subdirs[: MOST_FOLDERS - 2], "...", subdirs[-1]]
    return ", ".join(name if name == "..." else shown(sweep_dir / name) for name in names)
