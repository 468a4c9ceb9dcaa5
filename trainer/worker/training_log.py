"""Training lines of the log: the metrics of the batches since the last line, and of the epoch so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from trainer.metrics.contract import Objective
from trainer.strategies.contract import HasGauges
from trainer.worker.training import Training


def log_rest(run: Training) -> None:
    """Log the last batches of the run. They may be few, so the line averages them with the line before."""
    window = run.reporting.window
    if window.batches > window.logged:
        log_training(run, rest=True)


def log_training(run: Training, rest: bool = False) -> None:
    """Log one line: the task's metrics over all workers' batches since the last line. Collective in lockstep.

    Args:
        rest: include the batches of the last line.
    """
    progress, watchers, report, window = run.progress, run.watchers, run.reporting.report, run.reporting.window
    callbacks = watchers.callbacks
    sums = window.meter.sums()
    parts = [sums] if window.carried_sums is None else [sums, window.carried_sums.to(sums.device)]
    all_batches, last_batch = len(parts), _sums_of_last_batch(run, sums)
    if run.lockstep and report.who:
        _log_own(run, reduce(run.task.add, parts) if last_batch is None else last_batch, rest and last_batch is None)
    parts += [] if last_batch is None else [last_batch]
    if run.lockstep:
        asked = [callbacks.asked()] if callbacks else []  # in the same all-reduce, to save a second one
        parts = run.task.over_workers(run.strategy.all_reduce_sum, *run.strategy.members(), parts, asked)
        if callbacks:
            asks = parts.pop()
            progress.stop = progress.stop or callbacks.why(asks, progress.step, run.strategy.all_reduce_sum)
    whole = reduce(run.task.add, parts[:all_batches])
    shown = whole if last_batch is None else parts[-1]
    if rest and window.last_sums is not None and last_batch is None:
        shown = run.task.add(shown, window.last_sums)
    window.last_sums, window.logged, window.carried_sums = whole, window.batches, None
    window.epoch_sums = parts[0] if window.epoch_sums is None else run.task.add(parts[0], window.epoch_sums)
    metrics = run.task.summary(shown, window.epoch_sums)
    gauges = run.strategy.gauges() if report.run_dir and isinstance(run.strategy, HasGauges) else {}
    gauges |= watchers.step_hook.metrics(run)
    samples, batch = whole[-1].item(), window.batch_in_epoch
    report.training(progress.epoch, batch, progress.step, metrics, samples, window.lr, run.feed, gauges, rest)
    if "loss" in metrics:
        watchers.step_hook.after_log(run, metrics["loss"])


def _log_own(run: Training, own: torch.Tensor, rest: bool) -> None:
    """Log a line with this worker's own values."""
    window = run.reporting.window
    before, window.last_own_sums = window.last_own_sums, own
    shown = own if before is None or not rest else run.task.add(own, before)
    run.reporting.report.of_worker(run.progress.epoch, window.batch_in_epoch, run.task.summary(shown))


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
