"""The parent's view of a run in the terminal: the plan as tables, a progress bar from status.json, the last words."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from trainer import streams
from trainer.plan import MOST_PROCESSES_SHOWN, Plan
from trainer.terminal import Screen
from trainer.wording import counted

LOOK_EVERY_S = 0.25


def console() -> Screen:
    """The terminal; when piped, plain lines wide enough not to be cut."""
    return Screen()


def show_plan(plan: Plan) -> None:
    """The resolved plan and the first process's environment."""
    out = console()
    table = Table(title=f"Plan of {plan.name}", box=box.SIMPLE_HEAVY, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for what, value in rows(plan):
        table.add_row(what, value)
    out.print(table)
    environment = Table(title="Environment of worker 0", box=box.SIMPLE_HEAVY, show_header=False, title_justify="left")
    environment.add_column(style="bold")
    environment.add_column()
    for key, value in plan.environment.items():
        environment.add_row(key, value)
    out.print(environment)
    if plan.lacks:
        out.print("ATTENTION: this run would be refused:", style="bold red")
        for reason in plan.lacks:
            out.print(f"  - {reason}", soft_wrap=True)
    if plan.concern:
        out.print(f"ATTENTION: {plan.concern}", style="bold red")
    if plan.facts["attention"]:
        out.print(f"ATTENTION: {plan.facts['attention']}", style="bold red")
    if plan.facts["stand_in"]:
        out.print(f"ATTENTION: {plan.facts['stand_in']}", style="bold red")


def preprocessed(done: Mapping[str, Any]) -> Iterator[str]:
    """What validation does to an image, in a few words."""
    if done["resize"] is not None:
        yield f"shorter side to {done['resize']}, centre {done['crop']} x {done['crop']},"
    if done["divide"] is not None:
        yield f"/ {done['divide']},"
    if done["mean"] is None:
        yield "not normalised"
        return
    mean, std = (" ".join(f"{v:g}" for v in done[name]) for name in ("mean", "std"))
    yield f"mean {mean}, std {std}"


def rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """The plan's lines: what, and how much or where."""

    def because(key: str) -> str:
        return f"  (auto: {plan.why[key]})" if key in plan.why else ""

    hosts = f" on {plan.nnodes} hosts" if plan.nnodes > 1 else ""
    yield "strategy", plan.strategy + (" (equal to one process on the global batch)" if plan.exact else "") + because("strategy")  # fmt: skip
    yield "roles", ", ".join(counted(n, role) for role, n in plan.roles.items()) + hosts
    for process in plan.processes[:MOST_PROCESSES_SHOWN]:
        host = f"host {process.node}, " if plan.nnodes > 1 else ""
        yield f"  {process.role} {process.rank}", f"{host}{process.device}"
    if len(plan.processes) > MOST_PROCESSES_SHOWN:
        yield "  ...", f"and {counted(len(plan.processes) - MOST_PROCESSES_SHOWN, 'more process')}"
    for override in plan.left_out:
        yield "left out", override
    yield "meeting point", plan.endpoint
    merged = f" x {plan.merge} merged" if plan.merge > 1 else ""
    if plan.mode != "train":
        yield "mode", plan.mode
    portions = f"{plan.batch_size} per worker x {counted(plan.workers, 'worker')}{merged}"
    even = plan.batch_size * plan.workers * plan.merge == plan.global_batch_size
    yield "batch size", f"{portions} = {plan.global_batch_size} global" if even else f"{plan.global_batch_size} global, shared out: at most {portions}"  # fmt: skip
    if plan.mode == "train":
        yield (
            "updates",
            f"{plan.steps_per_epoch} per epoch, {plan.total_steps} in total ({counted(plan.epochs, 'epoch')})",
        )
    if plan.mode == "train" and plan.lr is not None:
        scaled = f" = {plan.lr / plan.lr_factor:g} x {plan.lr_factor:g}, for {counted(plan.update_batch, 'sample')} per update"
        yield "learning rate", f"{plan.lr:g}" + (scaled if plan.lr_factor != 1.0 else "")
    if plan.lockstep != plan.leased and "server" in plan.roles:
        yield "work", "leased in blocks; a lost worker's go to others" if plan.leased else "split beforehand"
    facts = plan.facts
    yield "data", f"{facts['source']}: {facts['train_samples']} training and {counted(facts['val_samples'], 'validation sample')} of {_shape(facts['shape'])}, {counted(facts['classes'], 'class')}"  # fmt: skip
    if facts["val_shape"]:
        yield "  validated", f"on samples of {_shape(facts['val_shape'])}"
    if plan.preprocessing:
        yield "  images", " ".join(preprocessed(plan.preprocessing))
    if facts["cache"]:
        yield "cache", facts["cache"]
    if facts["left_out"]:
        yield "left out", f"{counted(len(facts['left_out']), 'broken image')}: {', '.join(list(facts['left_out'])[:3])}"
    yield "model", counted(plan.parameters, "parameter", ",")
    for key, value in plan.chosen.items():
        yield key, str(value).lower() + because(key)
    yield "run folder", plan.run_dir
    yield "logs", f"{plan.run_dir}/workerlog.N" + (", serverlog.N" if "server" in plan.roles else "")
    if plan.mode == "train":
        yield "weights", f"{plan.run_dir}/model.safetensors, best {plan.best} in checkpoints/best.safetensors"
    else:
        yield "batches", f"{plan.total_steps} of each worker"
        yield "weights", plan.weights
    yield "tracking", plan.tracking or "none (the run folder only)"


def _shape(shape: Any) -> str:
    if isinstance(shape, dict):
        return " and ".join(f"{name} {tuple(size)}" for name, size in shape.items())
    return str(tuple(shape))


@contextmanager
def bar(run_dir: Path, total_steps: int) -> Iterator[None]:
    """On a terminal, a progress bar that follows status.json; elsewhere nothing, the lines say enough."""
    if not sys.stdout.isatty():
        yield
        return
    columns = (
        _column("{task.fields[where]}"), BarColumn(), MofNCompleteColumn(), _column("{task.fields[rate]}"),
        TimeElapsedColumn(), _column("ETA"), TimeRemainingColumn(), _column("{task.fields[metrics]}"),
    )  # fmt: skip
    done = threading.Event()
    with Progress(*columns, console=console(), transient=True) as progress, streams.guarded():
        task = progress.add_task("", total=total_steps, where="starting", rate="", metrics="")

        def follow() -> None:
            while not done.wait(LOOK_EVERY_S):
                if (status := read_status(run_dir)).get("state") == "running":
                    progress.update(task, completed=status["step"], **_fields(status))  # type: ignore[arg-type]

        thread = threading.Thread(target=follow, daemon=True, name="progress")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _column(form: str) -> TextColumn:
    """A column of text; what it shows is no markup."""
    return TextColumn(form, markup=False)


def _fields(status: dict[str, Any]) -> dict[str, str]:
    metrics = status["metrics"]
    shown = " ".join(
        f"{k}: {metrics['train/' + k]:.4f}" for k in ("loss", "acc1", "acc5", "auc") if f"train/{k}" in metrics
    )
    rate = f"{metrics['perf/samples_per_s']:.0f} samples/s" if "perf/samples_per_s" in metrics else ""
    return {"where": f"epoch {status['epoch']}", "rate": rate, "metrics": shown}


def read_status(run_dir: Path) -> dict[str, Any]:
    """status.json, or nothing yet."""
    try:
        return json.loads((run_dir / "status.json").read_text())  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return {}


@contextmanager
def preparing() -> Iterator[Any]:
    """Shows how far a preparation (download, drawing) is: a bar on a terminal, a few lines elsewhere."""
    shown: dict[str, int] = {}
    if not sys.stdout.isatty():

        def line(what: str, done: int, total: int) -> None:
            tenth = 10 * done // max(total, 1)
            if shown.get(what, -1) < tenth:
                shown[what] = tenth
                print(f"{what}: {done}/{total}", flush=True)

        yield line
        return
    columns = (_column("{task.description}"), BarColumn(), MofNCompleteColumn(), _column("ETA"), TimeRemainingColumn())
    with Progress(*columns, console=console(), transient=True) as progress, streams.guarded():
        tasks: dict[str, Any] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done, total=total)

        yield update
