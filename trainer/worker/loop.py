"""The training loop: epochs and updates. It knows the strategy contract and no strategy by name."""

from __future__ import annotations

from contextlib import suppress

import torch

from trainer.data.feed import Batch
from trainer.errors import Interrupted
from trainer.metrics.contract import Loss
from trainer.models.empty_batch import counting
from trainer.run_folder.report import Phase
from trainer.strategies.lost_workers import CountsSamples
from trainer.worker.training import Training
from trainer.worker.training_log import finish_line, log_rest, log_training, show_line
from trainer.worker.validation import poll_callbacks, validate, validation_due


def fit(run: Training) -> dict[str, float]:
    """Train to the end of the run; returns the metrics of the last validation."""
    callbacks, progress = run.watchers.callbacks, run.progress
    if not callbacks:
        return _fit_showing_lines(run)
    try:
        if not progress.step:
            callbacks.train_start(run.strategy.lr)
        metrics = _fit_showing_lines(run)
        callbacks.train_end(progress.epoch, progress.step, progress.validated[1], run.reporting.report.ended)
        return metrics
    except (Exception, KeyboardInterrupt, Interrupted) as error:
        callbacks.exception(progress.epoch, progress.step, error)
        raise


def _fit_showing_lines(run: Training) -> dict[str, float]:
    """Train; print the line before a failure as well, if a GPU has its numbers."""
    try:
        return _fit(run)
    except BaseException:
        with suppress(Exception):  # the GPU may have failed, and the disk may be full
            show_line(run)
        raise


def _fit(run: Training) -> dict[str, float]:
    progress, schedule, watchers = run.progress, run.schedule, run.watchers
    for epoch in range(progress.epoch, schedule.epochs):
        if progress.epoch_closed and run.over:  # resumed from a checkpoint in which max_steps had ended the run
            break
        progress.epoch_closed = False
        train_epoch(run, epoch)
        due = schedule.val_every and (epoch + 1) % schedule.val_every == 0
        if due or run.over or epoch + 1 == schedule.epochs:
            finish_line(run)
        done = progress.step >= schedule.total_steps or (epoch + 1 == schedule.epochs and not progress.stop)
        if done or progress.stop:
            log_rest(run)
        if (due or done or progress.stop) and (run.lockstep or not progress.stop):
            _validate_or_poll(run)  # a worker that steps apart may have stopped alone: it must not wait for others
        progress.epoch_closed = True
        if watchers.checkpoints is not None and not progress.stop:
            watchers.checkpoints.after_epoch(run)
        if done:
            break
        if progress.stop:
            log_rest(run)
            run.reporting.report.stopped(progress.stop)
            break
    run.strategy.synchronize()
    run.strategy.evaluate()
    ema = watchers.ema
    if ema is not None and (not schedule.validate or ema.step < progress.step):
        ema.follow(progress.step)
        ema.agree(run.strategy, watchers.average_ema)
    run.reporting.report.samples = _total_samples(run)
    return progress.validated[1]


def _validate_or_poll(run: Training) -> None:
    """Validate. A run without validations whose workers step apart polls callbacks here instead."""
    if run.schedule.validate:
        validate(run)
    elif run.watchers.callbacks and not run.lockstep:
        run.strategy.synchronize()
        poll_callbacks(run, run.watchers.callbacks)


def train_epoch(run: Training, epoch: int) -> None:
    """Train the updates of one epoch. An update has one batch, or several with gradient merge.

    A run resumed within the epoch starts at the next of its updates.
    """
    if not _begin_epoch(run, epoch):
        return
    strategy, progress, watchers, window = run.strategy, run.progress, run.watchers, run.reporting.window
    report, profile = run.reporting.report, run.reporting.profile
    for samples, batches in profile.each("data", run.feed.updates(epoch, progress.update)):
        report.doing("first update")
        watchers.step_hook.before_update(run)
        weight: float | torch.Tensor | None = None
        for batch in profile.each("data", batches):
            if run.captured is not None:
                run.captured.update(run, batch)
                continue
            if weight is None:
                weight = strategy.weight(batch.update_denominator)
            strategy.prepare(batch)
            if watchers.ema is not None:
                watchers.ema.follow(progress.step)
            with strategy.accumulate(batch.last), counting(run.model, batch.samples):
                with profile("forward"):
                    loss, outputs = forward(run, batch)
                watchers.step_hook.after_forward(run, batch, loss)
                with profile("backward"):
                    strategy.backward(_scaled(loss, weight * batch.share))
            window.add(Loss(loss, batch.denominator), outputs, batch, keep=run.schedule.log_last_batch)
        if run.captured is None:
            window.lr = strategy.lr
            with profile("optimizer"):
                if watchers.step_hook.after_backward(run):
                    strategy.step(samples)
                else:
                    strategy.skip(samples)
        progress.step, progress.update = progress.step + 1, progress.update + 1
        progress.samples += samples
        report.progress(epoch, progress.step)
        if window.batches >= window.next_log:
            window.next_log = window.batches + run.schedule.log_every
            log_training(run)
        if window.line is not None:
            show_line(run)
        if watchers.callbacks and watchers.callbacks.after_update:
            watchers.callbacks.update_end(epoch, progress.step, window.lr, samples, loss)
            if not run.model.training:
                run.forward.train()
        profile.step()
        if validation_due(run):
            finish_line(run)
            if run.over:
                log_rest(run)
            validate(run)
            run.forward.train()
        if watchers.checkpoints is not None:
            watchers.checkpoints.after_update(run)
        if run.over:
            break


def _begin_epoch(run: Training, epoch: int) -> bool:
    """Prepare the first update of an epoch; returns False if the run is over.

    A run resumed within an epoch makes up the validation that the run before was asked to leave.
    """
    progress, window = run.progress, run.reporting.window
    if epoch != progress.epoch:  # not at the end of the last epoch, where a checkpoint may still be saved
        progress.epoch, progress.update = epoch, 0
    resumed = run.lockstep and progress.update > 0
    if resumed and validation_due(run) and progress.validated[0] != progress.step and not run.over:
        validate(run)
    if run.over:  # the run was over in the checkpoint from which it resumed
        return False
    run.forward.train()
    run.reporting.report.doing("first batch")
    run.reporting.report.phase = Phase.TRAINING
    if not progress.update:
        window.begin_epoch()
        if run.schedule.log_last_batch:
            window.next_log = window.batches + 1
    return True


def forward(run: Training, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean loss () of a batch and the model's outputs."""
    with run.autocast():
        loss, outputs = run.task.forward(run.forward, batch.inputs, batch.labels, batch.denominator)
    run.reporting.report.pulse.sign()
    return loss, outputs


def _scaled(loss: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
    """Return ``loss * factor``. A factor on the device is not compared with 1, which would wait for the device."""
    if isinstance(factor, torch.Tensor):
        return loss * factor.to(loss.dtype)
    return loss if factor == 1.0 else loss * factor


def _total_samples(run: Training) -> int:
    """Return the samples that all workers have trained on. A strategy may count them itself, because a worker that has
    died reports none.
    """
    report = run.reporting.report
    if isinstance(run.strategy, CountsSamples):
        return max(run.strategy.samples_applied(), report.samples if run.lockstep else 0)
    if run.lockstep:
        return report.samples
    own = torch.tensor([float(run.progress.samples)], dtype=torch.float64)
    return int(run.strategy.all_reduce_sum(own).item())
