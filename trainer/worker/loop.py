"""The training loop: epochs, updates, evaluation, reports. It knows the strategy contract and no strategy by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from trainer.data.batch_reordering import Rewind
from trainer.data.evaluated_split import VAL
from trainer.data.feed import Feed
from trainer.errors import Interrupted
from trainer.metrics.best import AVERAGED, RAW, EarlyStop
from trainer.metrics.contract import Loss, Objective
from trainer.metrics.user_metrics import OwnMetrics
from trainer.models.empty_batch import counting
from trainer.optim.averaged import AveragedWeights
from trainer.run_folder.report import Report
from trainer.strategies.contract import GoesByValidations, Strategy
from trainer.strategies.lost_workers import CountsSamples
from trainer.worker.callbacks import Callbacks
from trainer.worker.lines import Line, log_rest, log_training
from trainer.worker.nonfinite import Stop
from trainer.worker.profiler import Unprofiled


class KeepsCheckpoints(Protocol):
    """Protocol of what saves checkpoints during the loop."""

    def after_update(self, run: Training) -> None:
        """Called after each update, its log line and its validation."""

    def after_epoch(self, run: Training) -> None:
        """Called after each epoch and its validation."""

    def validating(self, run: Training) -> AbstractContextManager[None]:
        """Context manager around each validation, which may be left for a checkpoint in the state before it."""

    def breaks_off(self, run: Training) -> bool:
        """Called before each batch of a validation: whether this worker leaves out the rest of its share."""

    def after_share(self, run: Training) -> None:
        """Called after a worker's share of a validation, on all workers."""


@dataclass
class Rhythm:
    """How long a run is, and how often it logs and validates.
    ``epochs``, ``total_steps`` in updates, ``log_every`` batches, ``val_every`` epochs, ``val_every_steps`` updates;
    ``validates``: False for a run without validations; ``alone``: a line tells of one batch of each ``log_every`` of
    an epoch, not of their mean."""

    epochs: int
    total_steps: int
    log_every: int
    val_every: int
    val_every_steps: int | None
    validates: bool = True
    alone: bool = False


@dataclass
class Training:
    """Everything that a worker needs to train, built from the config by ``worker/build.py``.

    Attributes:
        model: the module itself, which is evaluated and saved. forward: the module that is called in training, as the
        strategy placed it. arithmetic: context of a forward pass (autocast). lockstep: workers may meet inside an
        epoch. keep_best: saves the model, called after the best validation so far. profile: marks of where the time
        goes. run_dir: where the first worker reports to, should it not be the one that began; None: nobody takes over.
        ema: the moving average of the weights; mean: workers' averages differ and their mean counts. early_stop: says
        when to end before the last epoch. callbacks: the user's; own: the user's metrics. plateau: the schedule goes by
        validations. checkpoints: what the run can go on from is kept; None: nothing is. epoch, update: of the training,
        and updates done in that epoch. step: updates done; validated: the last validation's update and metrics; stop:
        why to end early. closed: what comes after the last of the epoch's updates is done, its validation among it.
        trained: the model's own tensors by name, on the CPU, while the best weights are in their place for the final
        test. examined: the sums of the last validation and, where this worker keeps the best model, of the best. line:
        what the next line of training will average. compiling: what is said to be done in the first update, where that
        is long. skeleton: of a model of the user's own, see :mod:`trainer.models.skeleton`; None: it is built again
        where it is needed. guard: what is done about numbers that are not finite. skipped, in_a_row: updates that were
        left out, and the last of them without another between. rewinds: the epochs whose batches come in another order,
        see :mod:`trainer.data.batch_reordering`.
    """

    model: nn.Module
    forward: nn.Module
    task: Objective
    strategy: Strategy
    feed: Feed
    report: Report
    rhythm: Rhythm
    arithmetic: Callable[[], AbstractContextManager[Any]]
    lockstep: bool
    keep_best: Callable[[], None] = lambda: None
    profile: Unprofiled = field(default_factory=Unprofiled)
    run_dir: Path | None = None
    ema: AveragedWeights | None = None
    mean: bool = False
    early_stop: EarlyStop | None = None
    callbacks: Callbacks | None = None
    own: OwnMetrics = field(default_factory=lambda: OwnMetrics({}))
    plateau: bool = False
    checkpoints: KeepsCheckpoints | None = None
    epoch: int = 0
    update: int = 0
    step: int = 0
    samples: int = 0
    validated: tuple[int, dict[str, float]] = (-1, {})
    stop: str = ""
    closed: bool = False
    trained: dict[str, torch.Tensor] = field(default_factory=dict)
    examined: dict[str, torch.Tensor] = field(default_factory=dict)
    compiling: str = ""
    skeleton: bytes | None = None
    guard: Stop = field(default_factory=Stop)
    skipped: int = 0
    in_a_row: int = 0
    rewinds: tuple[Rewind, ...] = ()
    line: Line = field(init=False)

    def __post_init__(self) -> None:
        self.line = Line(self.task)

    @property
    def over(self) -> bool:
        """Whether no update comes any more."""
        return self.step >= self.rhythm.total_steps or bool(self.stop)

    @torch.no_grad()
    def take_back(self) -> None:
        """Put the model's own tensors back, where others are in their place."""
        own = self.model.state_dict()
        for name, tensor in self.trained.items():
            own[name].copy_(tensor)
        self.trained = {}


def fit(run: Training) -> dict[str, float]:
    """Train to the end of the run; returns the last validation's metrics."""
    if not run.callbacks:
        return _fit(run)
    try:
        if not run.step:
            run.callbacks.train_start(run.strategy.lr)
        metrics = _fit(run)
        run.callbacks.train_end(run.epoch, run.step, run.validated[1], run.report.ended)
        return metrics
    except (Exception, KeyboardInterrupt, Interrupted) as error:
        run.callbacks.exception(run.epoch, run.step, error)
        raise


def _fit(run: Training) -> dict[str, float]:
    for epoch in range(run.epoch, run.rhythm.epochs):
        if run.closed and run.over:  # so was the checkpoint: max_steps ended the run inside this epoch
            break
        run.closed = False
        train_epoch(run, epoch)
        done = run.step >= run.rhythm.total_steps or (epoch + 1 == run.rhythm.epochs and not run.stop)
        if done or run.stop:
            log_rest(run, epoch)
        due = run.rhythm.val_every and (epoch + 1) % run.rhythm.val_every == 0
        if (due or done or run.stop) and (run.lockstep or not run.stop):
            look(run, epoch)  # workers without a common step are stopped here alone
        run.closed = True
        if run.checkpoints is not None and not run.stop:
            run.checkpoints.after_epoch(run)
        if done:
            break
        if run.stop:
            log_rest(run, epoch)
            run.report.stopped(run.stop)
            break
    run.strategy.synchronize()
    if run.ema is not None and (not run.rhythm.validates or run.ema.step < run.step):
        run.ema.follow(run.step)
        run.ema.agree(run.strategy, run.mean)
    run.report.samples = _trained(run)
    return run.validated[1]


def _trained(run: Training) -> int:
    """The samples that all workers have trained on: of workers that have died, their lines or their own counts lack
    some."""
    if isinstance(run.strategy, CountsSamples):
        return max(run.strategy.samples_applied(), run.report.samples if run.lockstep else 0)
    if run.lockstep:
        return run.report.samples
    return int(run.strategy.all_reduce_sum(torch.tensor([float(run.samples)], dtype=torch.float64)).item())


def look(run: Training, epoch: int) -> None:
    """Validate; without validations, asynchronous workers meet instead, to hear whether callbacks ask to stop."""
    if run.rhythm.validates:
        evaluate(run, epoch)
    elif run.callbacks and not run.lockstep:
        run.strategy.synchronize()
        _hear(run, run.callbacks)


def _hear(run: Training, callbacks: Callbacks) -> None:
    """Collective call after which all workers know whether a callback of any asks to end the run."""
    asked = run.strategy.all_reduce_sum(callbacks.asked())
    run.stop = run.stop or callbacks.why(asked, run.step, run.strategy.all_reduce_sum)


def train_epoch(run: Training, epoch: int) -> None:
    """Run the updates of one epoch, each from one batch or from several merged ones.
    A run that resumes in the middle of an epoch begins with the next one of its updates."""
    if epoch != run.epoch:  # not at the end of the last one: who waits there for others may save where it is
        run.epoch, run.update = epoch, 0
    if not run.over and _left_validation(run):
        evaluate(run, epoch)
    if run.over:  # so was the checkpoint that the run goes on from
        return
    run.forward.train()
    run.report.doing("first batch")
    strategy, line, profile = run.strategy, run.line, run.profile
    if not run.update:
        line.begin_epoch()
    if run.rhythm.alone and not run.update:
        line.due = line.batches + 1
    told = run.callbacks if run.callbacks and run.callbacks.after_update else None
    for samples, batches in profile.each("data", run.feed.updates(epoch, run.update)):
        run.report.doing("first update" + run.compiling)
        weight: float | torch.Tensor | None = None
        run.guard.begin(run)
        for batch in profile.each("data", batches):
            weight = strategy.weight(batch.update_denominator) if weight is None else weight
            strategy.prepare(batch)
            if run.ema is not None:
                run.ema.follow(run.step)
            with strategy.accumulate(batch.last), counting(run.model, batch.samples):
                with profile("forward"), run.arithmetic():
                    loss, outputs = run.task.forward(run.forward, batch.inputs, batch.labels, batch.denominator)
                run.report.pulse.sign()
                run.guard.look(run, batch, loss)
                with profile("backward"):
                    strategy.backward(_times(loss, weight * batch.share))
            seen = Loss(loss, batch.denominator), outputs, batch.labels, batch.samples
            line.meter.add(*seen)
            line.last = seen if run.rhythm.alone else None
            line.number, line.batches = line.number + 1, line.batches + 1
        line.lr = strategy.lr
        with profile("optimizer"):
            run.guard.step(run, samples)
        run.step, run.update = run.step + 1, run.update + 1
        run.samples += samples
        run.report.progress(epoch, run.step)
        if line.batches >= line.due:
            line.due = line.batches + run.rhythm.log_every
            log_training(run, epoch)
        if told:
            told.update_end(epoch, run.step, line.lr, samples, loss)
            if not run.model.training:
                run.forward.train()
        profile.step()
        if _validates_now(run):
            if run.over:
                log_rest(run, epoch)
            evaluate(run, epoch)
            run.forward.train()
        if run.checkpoints is not None:
            run.checkpoints.after_update(run)
        if run.over:
            break


def _times(loss: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
    """A factor on the device is not compared with 1, which would wait for it."""
    if isinstance(factor, torch.Tensor):
        return loss * factor.to(loss.dtype)
    return loss if factor == 1.0 else loss * factor


def _validates_now(run: Training) -> bool:
    every = run.rhythm.val_every_steps
    return bool(run.rhythm.validates and every and run.step % every == 0)


def _left_validation(run: Training) -> bool:
    """Whether the run goes on from a validation within an epoch, which the life before has left."""
    return run.lockstep and bool(run.update) and _validates_now(run) and run.validated[0] != run.step


@torch.no_grad()
def evaluate(run: Training, epoch: int) -> dict[str, float]:
    """Validate the synchronised model: compute the task's metrics, every sample counted exactly once.

    Beside them, those of the averaged weights are measured; the best model is kept, and whoever goes by validations
    (the schedule, the early stop) is told.
    """
    if run.lockstep and run.validated[0] == run.step:
        return run.validated[1]
    run.model.eval()
    leavable = nullcontext() if run.checkpoints is None else run.checkpoints.validating(run)
    with leavable, run.report.evaluating(), run.profile("evaluation"):
        sums, index, own = examined(run, run.strategy.synchronize)
        metrics = {**run.task.validation(sums), **own}
        values = {f"{RAW}{name}": value for name, value in metrics.items()}
        averages = _averaged(run, run.ema) if run.ema is not None else None
        if averages is not None:
            measured = {**run.task.validation(averages[0]), **averages[1]}
            values |= {f"{AVERAGED}{name}": value for name, value in measured.items()}
        if run.run_dir is not None:
            run.report.take_over(run.run_dir) if index == 0 else run.report.hand_over()
        run.examined["last"] = run.task.kept(sums)
        improved = run.report.validation(epoch, run.step, values)
        if improved:
            of_average = run.report.watched.metric.startswith(AVERAGED)
            run.examined["best"] = run.task.kept(averages[0] if averages is not None and of_average else sums)
            with run.ema.in_place() if run.ema is not None and of_average else nullcontext():
                run.keep_best()
        _decide(run, values)
        if run.callbacks:
            run.callbacks.validation_end(epoch, run.step, values, improved)
            _hear(run, run.callbacks)
    run.validated = run.step, metrics
    run.model.train()
    return metrics


def _averaged(run: Training, ema: AveragedWeights) -> tuple[torch.Tensor, dict[str, float]]:
    """Validate the averaged weights; returns the task's sums and the user's metrics.
    The model has its own weights again afterwards."""
    ema.follow(run.step)
    ema.agree(run.strategy, run.mean)
    with ema.in_place():
        sums, _, own = examined(run)
        return sums, own


def _decide(run: Training, values: Mapping[str, float]) -> None:
    """Pass a validation's metrics to the schedule and the early stop; all workers use the first one's numbers."""
    if not run.plateau and run.early_stop is None:
        return
    first = run.strategy.members()[0] == 0
    numbers = torch.tensor(list(values.values()), dtype=torch.float64)
    agreed = run.strategy.all_reduce_sum(numbers if first else torch.zeros_like(numbers)).tolist()
    values = dict(zip(values, agreed, strict=True))
    if run.plateau:
        assert isinstance(run.strategy, GoesByValidations)
        run.strategy.observe(run.step, values)
    if run.early_stop is not None:
        run.stop = run.early_stop.why(run.step, values) or run.stop


def examined(
    run: Training, settle: Callable[[], None] = lambda: None, split: str = VAL, model: nn.Module | None = None
) -> tuple[torch.Tensor, int, dict[str, float]]:
    """The task's sums over a split's samples, this worker's number among those who took part, the user's metrics.

    Args:
        settle: called before, on all workers.
        split: which samples. model: that is measured; None: the one that is trained.
    """
    model = model or run.model

    def shared(index: int, count: int) -> tuple[torch.Tensor, int, dict[str, float]]:
        own = _evaluated(run, index, count, split, model)
        sums = run.task.over_workers(run.strategy.all_reduce_sum, index, count, [own])[0]
        parts = run.own.gathered(run.strategy.all_reduce_sum, index, count)
        return sums, index, run.own.values(parts)

    return run.strategy.agree(shared, settle)


def _evaluated(run: Training, index: int, count: int, split: str, model: nn.Module) -> torch.Tensor:
    """The task's sums over this worker's share of a split's samples."""
    exam = run.task.exam(index, count)
    run.own.reset()
    for numbers, batch in run.feed.evaluation(index, count, split):
        if run.checkpoints is not None and run.checkpoints.breaks_off(run):
            break
        with run.arithmetic():
            loss, outputs = run.task.forward(model, batch.inputs, batch.labels, batch.denominator)
        run.report.pulse.sign()
        exam.add(Loss(loss, batch.denominator), outputs, batch.labels, batch.samples, numbers)
        run.own.add(outputs, batch.labels)
    if run.checkpoints is not None:
        run.checkpoints.after_share(run)
    return exam.sums()
