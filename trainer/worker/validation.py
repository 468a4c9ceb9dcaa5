"""Validation of the model during training, and what follows from its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from trainer.data.evaluated_split import VAL
from trainer.data.feed import Batch
from trainer.host.transfers import Arriving
from trainer.metrics.best import AVERAGED, RAW
from trainer.metrics.contract import Loss
from trainer.strategies.contract import HoldsShards, ObservesValidations
from trainer.worker.callbacks import Callbacks
from trainer.worker.training import Training

if TYPE_CHECKING:
    from trainer.optim.averaged import AveragedWeights


def validation_due(run: Training) -> bool:
    """Whether ``execution.val_every_steps`` asks for a validation after the last update."""
    every = run.schedule.val_every_steps
    return bool(run.schedule.validate and every and run.progress.step % every == 0)


@torch.no_grad()
def validate(run: Training) -> dict[str, float]:
    """Validate the synchronised model and return the task's metrics. Every sample counts exactly once.

    The averaged weights are measured as well. The best model is saved. The learning rate schedule, the early stop and
    the callbacks get the metrics. Collective.
    """
    progress, watchers, reporting = run.progress, run.watchers, run.reporting
    if run.lockstep and progress.validated[0] == progress.step:
        return progress.validated[1]
    run.model.eval()
    leavable = nullcontext() if watchers.checkpoints is None else watchers.checkpoints.validating(run)
    with leavable, run.strategy.evaluated(), reporting.report.evaluating(), reporting.profile("evaluation"):
        sums, index, own = measure_split(run, run.strategy.synchronize)
        metrics = {**run.task.validation(sums), **own}
        values = {f"{RAW}{name}": value for name, value in metrics.items()}
        ema_sums = None
        if watchers.ema is not None:
            ema_sums, ema_own = _measure_ema(run, watchers.ema)
            ema_metrics = {**run.task.validation(ema_sums), **ema_own}
            values |= {f"{AVERAGED}{name}": value for name, value in ema_metrics.items()}
        reporting.set_writer(index == 0)
        progress.val_sums["last"] = run.task.kept(sums)
        best = reporting.report.validation(progress.epoch, progress.step, values)
        improved = best and reporting.report.run_dir is not None
        if improved or (best and isinstance(run.strategy, HoldsShards)):
            by_ema = reporting.report.watched.metric.startswith(AVERAGED)
            progress.val_sums["best"] = run.task.kept(ema_sums if ema_sums is not None and by_ema else sums)
            with watchers.ema.in_place() if watchers.ema is not None and by_ema else nullcontext():
                watchers.save_best(improved)
        _pass_on(run, values)
        if watchers.callbacks:
            watchers.callbacks.validation_end(progress.epoch, progress.step, values, improved)
            poll_callbacks(run, watchers.callbacks)
    progress.validated = progress.step, metrics
    run.model.train()
    return metrics


def measure_split(
    run: Training, settle: Callable[[], None] = lambda: None, split: str = VAL, model: nn.Module | None = None
) -> tuple[torch.Tensor, int, dict[str, float]]:
    """Measure all samples of a split. Collective.

    Args:
        settle: collective call before the measurement.
        split: name of the split. model: module to measure; None: the trained one.

    Returns:
        The task's sums over all workers, on the CPU; this worker's index among those who took part; the user's metrics.
    """
    model = model or run.model
    user_metrics, checkpoints = run.watchers.user_metrics, run.watchers.checkpoints

    def measure_together(index: int, count: int) -> tuple[torch.Tensor, int, dict[str, float]]:
        own, cut = _measure_share(run, index, count, split, model)
        parts = run.task.over_workers(run.strategy.all_reduce_sum, index, count, [own], cut)
        sums, *cut = Arriving(parts).read(run.strategy.wait_for)
        if checkpoints is not None:
            checkpoints.after_shares(run, *cut)
        if user_metrics is None:
            return sums, index, {}
        states = user_metrics.gathered(run.strategy.all_reduce_sum, index, count)
        return sums, index, user_metrics.values(states)

    return run.strategy.agree(measure_together, settle)


def _measure_share(
    run: Training, index: int, count: int, split: str, model: nn.Module
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the task's sums over this worker's share of a split, and whether it left out a part of the share."""
    exam, checkpoints, user_metrics = run.task.exam(index, count), run.watchers.checkpoints, run.watchers.user_metrics
    if user_metrics is not None:
        user_metrics.reset()
    together = model is run.model and isinstance(run.strategy, HoldsShards)
    for numbers, batch in (_in_step if together else _alone)(run, index, count, split):
        with run.autocast(), run.strategy.accumulate(True) if together else nullcontext():
            loss, outputs = run.task.forward(model, batch.inputs, batch.labels, batch.denominator)
        run.reporting.report.pulse.sign()
        if numbers is None:
            continue
        exam.add(Loss(loss, batch.denominator), outputs, batch.labels, batch.samples, numbers)
        if user_metrics is not None:
            user_metrics.add(outputs, batch.labels)
    cut = [] if checkpoints is None else [checkpoints.after_share(run)]
    return exam.sums(), cut


Share = Iterator[tuple[np.ndarray | None, Batch]]
"""Batches of a worker's share of a split with their samples' indices; None: a batch that is not measured."""


def _alone(run: Training, index: int, count: int, split: str) -> Share:
    """This worker's share, unless the run is asked to leave."""
    checkpoints = run.watchers.checkpoints
    for numbers, batch in run.feed.evaluation(index, count, split):
        if checkpoints is not None and checkpoints.breaks_off(run):
            return
        yield numbers, batch


def _in_step(run: Training, index: int, count: int, split: str) -> Share:
    """This worker's share where workers meet in each forward. Who has no batch left computes one again for the others,
    and all leave together."""
    checkpoints, share = run.watchers.checkpoints, run.feed.evaluation(index, count, split)
    batch: Batch | None = None
    while True:
        found = next(share, None)
        asked = checkpoints is not None and checkpoints.breaks_off(run)
        flags = run.strategy.all_reduce_sum(torch.tensor([found is not None, asked], dtype=torch.float64))
        going_on, leaving = Arriving([flags]).read(run.strategy.wait_for)[0].tolist()
        if leaving or not going_on:
            return
        if found is None:
            batch = batch or next(run.feed.evaluation(0, count, split))[1]
            yield None, batch
        else:
            batch = found[1]
            yield found


def _measure_ema(run: Training, ema: AveragedWeights) -> tuple[torch.Tensor, dict[str, float]]:
    """Measure the averaged weights; returns the task's sums and the user's metrics."""
    ema.follow(run.progress.step)
    ema.agree(run.strategy, run.watchers.average_ema)
    with ema.in_place():
        sums, _, own = measure_split(run)
        return sums, own


def _pass_on(run: Training, values: Mapping[str, float]) -> None:
    """Pass the metrics to the learning rate schedule and the early stop. All workers use the first worker's numbers."""
    plateau, early_stop = run.watchers.plateau, run.watchers.early_stop
    if not plateau and early_stop is None:
        return
    first = run.strategy.members()[0] == 0
    numbers = torch.tensor(list(values.values()), dtype=torch.float64)
    agreed = run.strategy.all_reduce_sum(numbers if first else torch.zeros_like(numbers))
    values = dict(zip(values, Arriving([agreed]).read()[0].tolist(), strict=True))
    if plateau:
        assert isinstance(run.strategy, ObservesValidations)
        run.strategy.observe(run.progress.step, values)
    if early_stop is not None:
        run.progress.stop = early_stop.why(run.progress.step, values) or run.progress.stop


def poll_callbacks(run: Training, callbacks: Callbacks) -> None:
    """Stop the run if a callback of any worker asks for it. Collective."""
    if run.strategy.all_reduce_sum(callbacks.asked()).any():
        run.progress.stop = run.progress.stop or callbacks.why(run.progress.step, run.strategy.all_reduce_sum)
