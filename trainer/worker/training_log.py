"""Training lines of the log: the metrics of the batches since the last line, and of the epoch so far.

States of a line, and who moves it:

    due      its sums over all workers are made (:func:`log_training`); those of a GPU are on their way to the host
    shown    it is printed, and its point is written: at once on a CPU, else after the first update at which its numbers
             are there (:func:`show_line`), on each worker by itself
    done     its loss was checked, and a callback's wish to stop was followed. Workers in lockstep must do this at the
             same update: where the next line is due, or a validation, a checkpoint or the end comes (:func:`read_line`,
             :func:`finish_line`). Here alone the host waits, for a line that is not shown yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from trainer.host.transfers import Arriving, on_its_way
from trainer.metrics.contract import Objective
from trainer.run_folder.report import Due
from trainer.strategies.contract import HasGauges
from trainer.worker.lines import Line, Position
from trainer.worker.training import Training


def log_rest(run: Training) -> None:
    """Log the last batches of the run, and wait for the line. The batches may be few, so the line averages them with
    the line before."""
    window = run.reporting.window
    if window.batches > window.logged:
        log_training(run, rest=True)
    finish_line(run)


def log_training(run: Training, rest: bool = False) -> None:
    """Log one line: the task's metrics over all workers' batches since the last line. Collective in lockstep.

    The numbers of a GPU are not waited for: :func:`show_line` prints the line when they are there, at the latest when
    the next line is due.

    Args:
        rest: include the batches of the last line, and wait.
    """
    finish_line(run)
    run.reporting.window.line = line = _make_line(run, rest)
    if line.due is None or line.numbers.event is None:
        finish_line(run)


def show_line(run: Training) -> None:
    """Print the line that waits for its numbers, if they are there. Of a worker alone: the others may not be as far."""
    line = run.reporting.window.line
    if line is not None and line.numbers.there:
        _show(run, line)


def read_line(run: Training) -> None:
    """Wait for the line that waits for its numbers, and print it. All workers call it after the same update.

    Raises:
        NotFinite: the loss of the line is not finite, with ``on_nonfinite=stop``.
    """
    window = run.reporting.window
    line, window.line = window.line, None
    if line is None:
        return
    _show(run, line)
    if run.lockstep and run.watchers.callbacks:
        window.stop_asked = window.stop_asked or bool(line.numbers.read(run.strategy.wait_for)[-1].any())
    if line.loss is not None:
        run.watchers.step_hook.after_log(run, line.loss, line.losses, line.at)


def finish_line(run: Training) -> None:
    """Like :func:`read_line`, and end the run if a callback has asked for it by then. Collective in lockstep.

    Raises:
        NotFinite: the loss of the line is not finite, with ``on_nonfinite=stop``.
    """
    read_line(run)
    window, progress, callbacks = run.reporting.window, run.progress, run.watchers.callbacks
    if window.stop_asked and callbacks:
        window.stop_asked = False
        progress.stop = progress.stop or callbacks.why(progress.step, run.strategy.all_reduce_sum)


def _make_line(run: Training, rest: bool) -> Line:
    """Make the sums of a line over all workers, which empties the window."""
    progress, watchers, report, window = run.progress, run.watchers, run.reporting.report, run.reporting.window
    callbacks, own = watchers.callbacks, None
    sums = window.meter.sums()
    parts = [sums] if window.carried_sums is None else [sums, window.carried_sums.to(sums.device)]
    all_batches, last_batch = len(parts), _sums_of_last_batch(run, sums)
    if run.lockstep and report.who:
        alone = reduce(run.task.add, parts) if last_batch is None else last_batch
        own = _own_sums(run, alone, rest and last_batch is None)
    parts += [] if last_batch is None else [last_batch]
    asked: list[torch.Tensor] = []
    if run.lockstep:
        asked = [callbacks.asked()] if callbacks else []  # in the same all-reduce, to save a second one
        parts = run.task.over_workers(run.strategy.all_reduce_sum, *run.strategy.members(), parts, asked)
        asked = [parts.pop()] if asked else []
    whole = reduce(run.task.add, parts[:all_batches])
    shown = whole if last_batch is None else parts[-1]
    if rest and window.last_sums is not None and last_batch is None:
        shown = run.task.add(shown, window.last_sums)
    window.last_sums, window.logged, window.carried_sums = whole, window.batches, None
    window.epoch_sums = parts[0] if window.epoch_sums is None else run.task.add(parts[0], window.epoch_sums)
    gauges = run.strategy.gauges() if report.run_dir and isinstance(run.strategy, HasGauges) else {}
    numbers = [shown, window.epoch_sums, whole[-1:], *([] if own is None else [own]), *asked]
    return Line(
        Arriving([on_its_way(number, whole.device) for number in numbers]),
        own is not None,
        None if rest or run.over else Due.now(run.feed),  # the last line has the time of the last update's end
        window.batch_in_epoch,
        window.lr,
        {**gauges, **watchers.step_hook.metrics(run)},
        rest,
        watchers.step_hook.unchecked(),
        Position(progress.epoch, max(0, progress.update - 1), progress.step, window.batch_in_epoch),
    )


def _show(run: Training, line: Line) -> None:
    """Print a line and write its point, once."""
    if line.shown:
        return
    report = run.reporting.report
    shown, epoch_sums, samples, *others = line.numbers.read(run.strategy.wait_for)
    if line.own:
        report.of_worker(line.at.epoch, line.batch, run.task.summary(others[0]))
    metrics, due = run.task.summary(shown, epoch_sums), line.due or Due.now(run.feed)
    report.training(
        line.at.epoch, line.batch, line.at.step, metrics, samples.item(), line.lr, due, line.gauges, line.rest
    )
    line.shown, line.loss = True, metrics.get("loss")


def _own_sums(run: Training, own: torch.Tensor, rest: bool) -> torch.Tensor:
    """Return the sums of a line with this worker's own values."""
    window = run.reporting.window
    before, window.last_own_sums = window.last_own_sums, own
    return own if before is None or not rest else run.task.add(own, before)


def _sums_of_last_batch(run: Training, sums: torch.Tensor) -> torch.Tensor | None:
    """Return the sums of the last batch if a line shows it alone; None if a line averages all batches."""
    if not run.schedule.log_last_batch:
        return None
    if run.reporting.window.last_batch is None:  # its update was skipped
        return sums
    meter = run.task.meter()
    meter.add(*run.reporting.window.last_batch)
    return meter.sums(sums.device)


def merged_window(
    parts: Sequence[Mapping[str, Any]], first: Mapping[str, Any], lockstep: bool, task: Objective
) -> dict[str, Any]:
    """Merge the saved log windows of the former workers whose place a worker takes: several, one, or none.

    Args:
        first: state of the first worker's window.
        lockstep: sums of a line are of all workers; else of each alone.
        task: adds sums.
    """

    def values(name: str) -> list[torch.Tensor]:
        return [value for part in parts if (value := part.get(name)) is not None]

    merged = dict(parts[0] if parts else first)
    if first.get("carried_sums") is not None:  # workers add theirs up when they log
        merged["carried_sums"] = reduce(task.add, values("carried_sums"), task.meter().sums())
    if not lockstep:
        sums = values("epoch_sums")
        merged["epoch_sums"] = reduce(task.add, sums) if sums else None
    return merged
