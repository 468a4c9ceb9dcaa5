"""State of one training process, made of its parts. The loop and its hooks read and change it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import nn

from trainer.data.batch_reordering import Rewind
from trainer.data.feed import Batch, Feed
from trainer.host.sharded import local
from trainer.metrics.best import EarlyStop
from trainer.metrics.contract import Loss, Objective, Sums
from trainer.run_folder.report import Report
from trainer.strategies.contract import Strategy
from trainer.worker.callbacks import Callbacks
from trainer.worker.lines import BatchLoss, Line, Position

if TYPE_CHECKING:
    from trainer.metrics.user_metrics import OwnMetrics
    from trainer.optim.averaged import AveragedWeights

T = TypeVar("T")
_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass
class Progress:
    """Position of the training. A checkpoint saves every field and a resumed run restores it.

    Attributes:
        epoch: epoch that is being trained, from 0. update: updates done in that epoch. epoch_closed: the epoch is done
        with its validation and checkpoint.
        step: updates done in the run. samples: samples that this worker has trained on.
        skipped: updates left out because they were not finite. skipped_in_a_row: the latest ones of them in a row.
        stop: reason to end before the last epoch; empty: there is none.
        validated: step and metrics of the last validation. val_sums: the task's sums of the ``last`` validation and,
        on the worker that keeps the best model, of the ``best`` one.
        rewinds: returns to a checkpoint; batches then come in another order (:mod:`trainer.data.batch_reordering`).
    """

    epoch: int = 0
    update: int = 0
    epoch_closed: bool = False
    step: int = 0
    samples: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    stop: str = ""
    validated: tuple[int, dict[str, float]] = (-1, {})
    val_sums: dict[str, torch.Tensor] = field(default_factory=dict)
    rewinds: tuple[Rewind, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """Length of the run, and when it logs and validates.

    Attributes:
        epochs, total_steps: length in epochs and in updates, whichever ends first.
        log_every: batches between two log lines. log_last_batch: a line has the metrics of the last batch, not of all
        batches since the line before.
        val_every: epochs between two validations. val_every_steps: updates between two. validate: False for a run
        without validations.
    """

    epochs: int
    total_steps: int
    log_every: int
    val_every: int
    val_every_steps: int | None
    validate: bool = True
    log_last_batch: bool = False


class StepHook(Protocol):
    """Hook around the step of each update. ``on_nonfinite`` chooses one of :mod:`trainer.worker.nonfinite`."""

    def before_update(self, run: Training) -> None:
        """Called before the first forward of an update."""

    def after_forward(self, run: Training, batch: Batch, loss: torch.Tensor) -> None:
        """Called after each forward with the batch and its mean loss ()."""

    def after_backward(self, run: Training) -> bool:
        """Called after the last backward of an update. True keeps the update, False skips its step."""

    def unchecked(self) -> Sequence[BatchLoss]:
        """Return the losses that no line has checked yet, and forget them. Called when a line is due."""

    def after_log(self, run: Training, loss: float, losses: Sequence[BatchLoss], at: Position) -> None:
        """Called after each log line. On a GPU this may be an interval after the update at which the line was due.

        Args:
            loss: of the line. losses: what :meth:`unchecked` returned when it was due. at: its last batch.
        """

    def metrics(self, run: Training) -> dict[str, float]:
        """Return metrics for the next log line. Collective if workers step apart."""


class CheckpointHook(Protocol):
    """Saves checkpoints during the loop."""

    def after_update(self, run: Training) -> None:
        """Called after each update, its log line and its validation."""

    def after_epoch(self, run: Training) -> None:
        """Called after each epoch and its validation."""

    def validating(self, run: Training) -> AbstractContextManager[None]:
        """Context manager around a validation. A checkpoint inside it has the state before the validation."""

    def breaks_off(self, run: Training) -> bool:
        """Called before each validation batch. True leaves out the rest of this worker's share."""

    def after_share(self, run: Training) -> torch.Tensor:
        """Called on all workers after a worker's share of a validation. Returns (1,): 1.0 if it left out a part."""

    def after_shares(self, run: Training, cut: torch.Tensor) -> None:
        """Called on all workers with the sum of :meth:`after_share` over them."""


@dataclass
class Watchers:
    """What follows the training and may change or end it.

    Attributes:
        step_hook: keeps or skips each update. callbacks: the user's callbacks. checkpoints: None: no checkpoints.
        user_metrics: the user's validation metrics; None: there are none.
        early_stop: ends the run before the last epoch. plateau: the learning rate follows validations.
        ema: moving average of the weights. average_ema: workers have different averages; use their mean.
        save_best: saves the model, or takes part (first=False); called after the best validation so far.
    """

    step_hook: StepHook
    callbacks: Callbacks | None = None
    checkpoints: CheckpointHook | None = None
    user_metrics: OwnMetrics | None = None
    early_stop: EarlyStop | None = None
    plateau: bool = False
    ema: AveragedWeights | None = None
    average_ema: bool = False
    save_best: Callable[[bool], None] = lambda first: None


class Unprofiled:
    """Stands in for the profiler when nothing is profiled: its marks do nothing."""

    def __call__(self, part: str) -> AbstractContextManager[None]:
        """Around what belongs to a part of the step."""
        return _NOTHING

    def each(self, part: str, items: Iterable[T]) -> Iterable[T]:
        """Yield the same items; the time to get each counts as that part of the step."""
        return items

    def step(self) -> None:
        """Mark the end of an update, for the profiler; does nothing without one."""

    def close(self, hangs: bool = False) -> None:
        """End the profile at the end of the run; does nothing without one.

        Args:
            hangs: the GPU may never come to an end, so nothing waits for it.
        """


class LogWindow:
    """Batches since the last log line, which the next line averages. They may be of two epochs.

    Attributes:
        batches: batches since the start of the run. logged: how many of them have been in a line. next_log: value of
        ``batches`` at which the next line is due. batch_in_epoch: number of the last batch in its epoch, from 0.
        lr: learning rate of the last update.
        last_sums: sums of the last line over all workers. last_own_sums: the same of this worker alone.
        epoch_sums: sums of the epoch up to the last line, over all workers.
        carried_sums: this worker's sums of batches of an earlier epoch, which the next line includes.
        last_batch: loss, outputs, labels and samples of the last batch, with ``Schedule.log_last_batch``.
        line: the line that waits for its numbers, of a GPU; None: none does. stop_asked: a callback asks to stop, as a
        line has found out; the run follows where all workers are at the same update.
    """

    SAVED = (
        "batches",
        "logged",
        "next_log",
        "batch_in_epoch",
        "lr",
        "last_sums",
        "epoch_sums",
        "carried_sums",
        "stop_asked",
    )
    """Attributes that a checkpoint saves. The batches in ``meter`` are saved apart, because workers share them out."""

    def __init__(self, task: Objective) -> None:
        self.task = task
        self.meter: Sums = task.meter()
        self.batches, self.logged, self.next_log, self.batch_in_epoch = 0, 0, 1, -1
        self.lr = 0.0
        self.last_sums: torch.Tensor | None = None
        self.last_own_sums: torch.Tensor | None = None
        self.epoch_sums: torch.Tensor | None = None
        self.carried_sums: torch.Tensor | None = None
        self.last_batch: tuple[Loss, torch.Tensor, torch.Tensor, int] | None = None
        self.line: Line | None = None
        self.stop_asked = False

    def begin_epoch(self) -> None:
        """Start the sums of an epoch at zero, before its first batch."""
        self.batch_in_epoch, self.epoch_sums = -1, None
        if self.batches > self.logged:
            sums = self.meter.sums()
            self.carried_sums = sums if self.carried_sums is None else self.task.add(sums, self.carried_sums)

    def add(self, loss: Loss, outputs: torch.Tensor, batch: Batch, keep: bool) -> None:
        """Add a trained batch. ``keep`` it as ``last_batch``."""
        seen = loss, outputs, batch.labels, batch.samples
        self.meter.add(*seen)
        self.last_batch = seen if keep else None
        self.batch_in_epoch, self.batches = self.batch_in_epoch + 1, self.batches + 1

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint saves besides the batches of ``meter``."""
        return {name: getattr(self, name) for name in self.SAVED}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        for name in self.SAVED:
            setattr(self, name, state[name])


@dataclass
class Reporting:
    """Where the training reports to.

    Attributes:
        report: the run folder's metrics and status. window: batches of the next log line. profile: marks the parts of a
        step for the profiler.
        run_dir: run folder, for whichever worker takes over reporting; None: no worker takes over.
        compiles: the first update compiles the model, which takes long.
    """

    report: Report
    window: LogWindow
    profile: Unprofiled = field(default_factory=Unprofiled)
    run_dir: Path | None = None
    compiles: bool = False

    def set_writer(self, first: bool) -> None:
        """Let the first worker of those that take part write the run folder, and no other worker."""
        if self.run_dir is not None:
            self.report.take_over(self.run_dir) if first else self.report.hand_over()


@dataclass
class FinalTest:
    """What the test at the end needs, which measures the weights of the best model.

    Attributes:
        skeleton: the user's own model without weights, see :mod:`trainer.models.skeleton`; None: the config builds it.
        trained: the model's own tensors by name, on the CPU, while the best weights are in their place.
    """

    skeleton: bytes | None = None
    trained: dict[str, torch.Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def restore_trained(self, model: nn.Module) -> None:
        """Put the model's own tensors back, if others are in their place."""
        state = model.state_dict()
        for name, tensor in self.trained.items():
            local(state[name]).copy_(tensor)
        self.trained = {}


class Captured(Protocol):
    """Runs updates that are captured as a CUDA graph."""

    def update(self, run: Training, batch: Batch) -> None:
        """Run one update on a batch."""


@dataclass
class Training:
    """One training process: model, data and strategy, and the parts of its state. ``worker/build.py`` makes it.

    Attributes:
        model: the module that is evaluated and saved. forward: the module that training calls, as the strategy wrapped
        it. autocast: context of a forward pass.
        lockstep: all workers take the same steps, and may meet within an epoch.
        captured: runs each update as a CUDA graph; None: updates are not captured.
    """

    model: nn.Module
    forward: nn.Module
    task: Objective
    strategy: Strategy
    feed: Feed
    autocast: Callable[[], AbstractContextManager[Any]]
    lockstep: bool
    schedule: Schedule
    watchers: Watchers
    reporting: Reporting
    progress: Progress = field(default_factory=Progress)
    final_test: FinalTest = field(default_factory=FinalTest)
    captured: Captured | None = None

    @property
    def over(self) -> bool:
        """Whether no more updates come."""
        return self.progress.step >= self.schedule.total_steps or bool(self.progress.stop)
