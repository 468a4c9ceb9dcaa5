"""The progress bar: what the run waits for, the best value so far, and the progress of asynchronous workers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.constrain import Constrain
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from trainer.terminal import streams
from trainer.terminal.screen import Screen
from trainer.terminal.status import read_status

LOOK_EVERY_S = 0.25
SHOWN = ("loss", "acc1", "acc5", "auc", "rmse", "r2", "f1")
PEERS = "status.*.json"
"""Files of each worker's progress, if workers have no common step."""


class Bar(Progress):
    """A progress bar over the whole line, with lines of text under it that are cut at the terminal's edge."""

    below: tuple[str, ...] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        """What rich draws: the bar, then the lines."""
        yield from super().get_renderables()
        for line in self.below:  # one column less: the ^C that a terminal shows would begin a new line
            yield Constrain(Text(line, style="dim", no_wrap=True, overflow="ellipsis"), self.console.width - 4)


@contextmanager
def bar(run_dir: Path, total_steps: int, verbosity: str = "normal") -> Iterator[None]:
    """Context manager: shows a run's progress bar, which follows status.json, on a terminal; nothing elsewhere."""
    if not sys.stdout.isatty() or verbosity == "quiet":
        yield
        return
    columns = (
        _column("{task.fields[where]}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        _column("ETA"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Screen(), transient=True, expand=True) as progress, streams.guarded():
        task = progress.add_task("", total=total_steps, where="starting: importing")

        def refresh() -> None:
            status = read_status(run_dir)
            if status.get("state") == "starting" and "doing" in status:
                progress.update(task, where=f"starting: {status['doing']}")
            elif status.get("state") == "running":
                progress.below = tuple(filter(None, (_measured(status), _peers(run_dir))))
                progress.update(task, completed=status["step"], total=status["total"], where=f"epoch {status['epoch']}")

        with _every(LOOK_EVERY_S, refresh):
            yield


@contextmanager
def _every(seconds: float, call: Callable[[], None]) -> Iterator[None]:
    """Context manager: call a function every so many seconds, in a thread."""
    done = threading.Event()

    def follow() -> None:
        while not done.wait(seconds):
            call()

    thread = threading.Thread(target=follow, daemon=True, name="progress")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _measured(status: dict[str, Any]) -> str:
    """The bar's text for metrics: ``loss 0.31 acc1 0.91 286 samples/s best acc1 0.95``."""
    metrics = status["metrics"]
    parts = [f"{name} {metrics[f'train/{name}']:.4f}" for name in SHOWN if f"train/{name}" in metrics]
    if "perf/samples_per_s" in metrics:
        parts.append(f"{metrics['perf/samples_per_s']:.0f} samples/s")
    if best := status.get("best"):
        parts.append(f"best {best['metric'].removeprefix('val/')} {best['value']:.4f}")
    return "  ".join(parts)


def _peers(run_dir: Path) -> str:
    """The bar's text for workers without a common step: ``worker 0: 120 worker 1: 117``."""
    statuses = [(int(path.suffixes[-2][1:]), read_status(run_dir, path.name)) for path in run_dir.glob(PEERS)]
    return "  ".join(
        f"worker {rank}: {status['step']}" for rank, status in sorted(statuses, key=lambda t: t[0]) if status
    )


def _column(form: str) -> TextColumn:
    """A column of text without markup."""
    return TextColumn(form, markup=False)


@contextmanager
def preparing(verbosity: str = "normal") -> Iterator[Any]:
    """Context manager: shows the progress of a preparation (download, drawing): a bar on a terminal, else lines."""
    if verbosity == "quiet":
        yield lambda what, done, total: None
        return
    shown: dict[str, int] = {}
    if not sys.stdout.isatty():

        def line(what: str, done: int, total: int) -> None:
            tenth = 10 * done // max(total, 1)
            if shown.get(what, -1) < tenth:
                shown[what] = tenth
                print(f"{what}: {done}/{total}", flush=True)

        yield line
        return
    columns = (
        _column("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        _column("ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Screen(), transient=True, expand=True) as progress, streams.guarded():
        tasks: dict[str, Any] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done, total=total)

        yield update
