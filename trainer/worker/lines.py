"""The training lines of the log: the metrics of the batches since the last line, and of the epoch so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch

from trainer.metrics.contract import Loss, Objective, Sums
from trainer.strategies.contract import HasGauges

if TYPE_CHECKING:
    from trainer.worker.loop import Training


@dataclass
class Line:
    """Collects the batches since the last log line, of whatever epochs, which the next line will average.

    Attributes:
        batches: since the run's start; printed: how many of them lines have told of; due: at how many the next line
        comes. lr: of the last update; number: of the last batch in its epoch. before: the sums of the last line, over
        all workers; mine: of this worker alone. epoch: the sums of the epoch so far at the last line, as ``before``;
        earlier: this worker's of batches that an
            earlier epoch had left, and of which the next line tells, too.
        last: loss, outputs, labels and samples of the last batch, where a line tells of one batch alone.
    """

    task: Objective
    batches: int = 0
    printed: int = 0
    due: int = 1
    lr: float = 0.0
    number: int = -1
    before: torch.Tensor | None = None
    mine: torch.Tensor | None = None
    epoch: torch.Tensor | None = None
    earlier: torch.Tensor | None = None
    last: tuple[Loss, torch.Tensor, torch.Tensor, int] | None = None
    meter: Sums = field(init=False)

    def __post_init__(self) -> None:
        self.meter = self.task.meter()

    def begin_epoch(self) -> None:
        """Start the sums over an epoch anew, before its first batch."""
        self.number, self.epoch = -1, None
        if self.batches > self.printed:
            sums = self.meter.sums()
            self.earlier = sums if self.earlier is None else self.task.add(sums, self.earlier)


def log_rest(run: Training, epoch: int) -> None:
    """Log the batches left at the end of the run. They are too few, so the line before is averaged with them."""
    if run.line.batches > run.line.printed:
        log_training(run, epoch, rest=True)


def log_training(run: Training, epoch: int, rest: bool = False) -> None:
    """Log one training line and point: the task's metrics over all workers' samples since the last line.

    Args:
        rest: together with those of the last line.
    """
    line = run.line
    sums = line.meter.sums()
    parts = [sums] if line.earlier is None else [sums, line.earlier.to(sums.device)]
    left, shown = len(parts), _of_last_batch(run, sums)
    if run.lockstep and run.report.who:
        _of_worker(run, reduce(run.task.add, parts) if shown is None else shown, rest and shown is None)
    parts += [] if shown is None else [shown]
    if run.lockstep:
        asked = [run.callbacks.asked()] if run.callbacks else []  # travels along: one meeting for all
        parts = run.task.over_workers(run.strategy.all_reduce_sum, *run.strategy.members(), parts, asked)
        if run.callbacks:
            run.stop = run.stop or run.callbacks.why(parts.pop(), run.step, run.strategy.all_reduce_sum)
    whole = reduce(run.task.add, parts[:left])
    together = whole if shown is None else parts[-1]
    if rest and line.before is not None and shown is None:
        together = run.task.add(together, line.before)
    line.before, line.printed, line.earlier = whole, line.batches, None
    line.epoch = parts[0] if line.epoch is None else run.task.add(parts[0], line.epoch)
    metrics = run.task.summary(together, line.epoch)
    gauges = run.strategy.gauges() if run.report.run_dir and isinstance(run.strategy, HasGauges) else {}
    gauges |= run.guard.skipped(run)
    run.report.training(epoch, line.number, run.step, metrics, whole[-1].item(), line.lr, run.feed, gauges, rest)
    if "loss" in metrics:
        run.guard.line(run, metrics["loss"])


def _of_worker(run: Training, own: torch.Tensor, rest: bool) -> None:
    """A line of this worker's own values."""
    line = run.line
    before, line.mine = line.mine, own
    together = own if before is None or not rest else run.task.add(own, before)
    run.report.of_worker(run.epoch, line.number, run.task.summary(together))


def _of_last_batch(run: Training, sums: torch.Tensor) -> torch.Tensor | None:
    """The sums of the last batch alone, where the line tells of no more; None: it tells of all."""
    if not run.rhythm.alone:
        return None
    if run.line.last is None:  # that update was left out
        return sums
    meter = run.task.meter()
    meter.add(*run.line.last)
    return meter.sums(sums.device)


def line_of(
    parts: Sequence[Mapping[str, Any]], first: Mapping[str, Any], lockstep: bool, task: Objective
) -> dict[str, Any]:
    """Combine the log lines in progress of the former workers whose place a worker takes: several, one, or none.

    Args:
        first: that of the first worker; lockstep: the sums of lines are of all workers, else of each alone.
        task: adds sums up.
    """

    def values(name: str) -> list[torch.Tensor]:
        return [value for part in parts if (value := part.get(name)) is not None]

    found = dict(parts[0] if parts else first)
    if first.get("earlier") is not None:  # the workers add it up
        found |= {"earlier": reduce(task.add, values("earlier"), task.meter().sums())}
    if not lockstep:
        sums = values("epoch")
        found |= {"epoch": reduce(task.add, sums) if sums else None}
    return found
