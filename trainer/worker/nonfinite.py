"""Step hooks for ``on_nonfinite``: stop, rewind or skip when a loss or gradient is NaN or infinite.

    stop     checks losses. The run ends at the first bad one, with a report in ``nonfinite.json``.
    rewind   checks losses and gradients before each step, and ends the process; the launcher resumes from a checkpoint.
    skip     checks the same, undoes the update and goes on.

A loss on a GPU is not read at once, because reading waits for the device. ``stop`` reads the losses of a log line whose
own loss is not finite; ``rewind`` and ``skip`` wait before each step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.data.feed import Batch
from trainer.errors import NotFinite
from trainer.host.sharded import local
from trainer.run_folder.reset_files import REPORT
from trainer.wording import counted
from trainer.worker.lines import BatchLoss, Position
from trainer.worker.model import not_finite_parameters
from trainer.worker.training import Training

MOST_SKIPS = 100
"""Limit of updates skipped in a row; one more ends the run."""
MOST_LINES = 5
"""The first skipped updates have a line each; the others are counted in ``train/skipped``."""
ADVICE = "A lower optimizer.lr, a warm-up (scheduler.warmup_epochs) or strategy.clip_norm=1.0 usually helps."
SKIPPED = "train/skipped"


@dataclass
class Stop:
    """``on_nonfinite=stop``: ends the run at the first batch whose loss is NaN or infinite, with a report.

    Args:
        rank, size: this worker's rank, and the number of workers.
        together: all workers take the same step, or none does.
    """

    rank: int = 0
    size: int = 1
    together: bool = False
    losses: list[BatchLoss] = field(default_factory=list)
    """Losses that are not checked yet."""
    name = "stop"

    def read_waits(self, loss: torch.Tensor) -> bool:
        """Whether reading a loss waits for the device."""
        return loss.device.type != "cpu"

    def before_update(self, run: Training) -> None:
        """Does nothing."""

    def after_forward(self, run: Training, batch: Batch, loss: torch.Tensor) -> None:
        """Check the loss of a batch on the CPU.

        Raises:
            NotFinite: the loss is not finite.
        """
        if self.read_waits(loss):
            self.losses.append(_batch_loss(run, loss))
        elif not math.isfinite(loss.item()):
            raise self.report(run, [_batch_loss(run, loss, batch)])

    def after_backward(self, run: Training) -> bool:
        """Keep every update."""
        return True

    def unchecked(self) -> Sequence[BatchLoss]:
        """Return the losses since the last line, and forget them."""
        losses, self.losses = self.losses, []
        return losses

    def after_log(self, run: Training, loss: float, losses: Sequence[BatchLoss], at: Position) -> None:
        """Check the loss of a log line, which in lockstep is the mean over all workers.

        Raises:
            NotFinite: the loss is not finite.
        """
        if math.isfinite(loss):
            return
        bad = _first_bad(losses)
        if bad is not None or not run.lockstep:
            error = self.report(run, losses[bad or 0 :][:1], loss=loss)
        else:
            error = nonfinite_error(run, f"The loss is {loss}", at)
        if run.lockstep:
            _wait_for_report(run)
        raise error

    def report(
        self, run: Training, losses: Sequence[BatchLoss], what: str = "loss", loss: float = math.nan
    ) -> NotFinite:
        """Write the report about these batches, the first of which is to blame; returns the error to raise."""
        if not losses:
            return nonfinite_error(run, f"The loss is {loss}", report=False)
        from trainer.worker.nonfinite_report import Finding, leave_report

        first = losses[0]
        value = float(first.loss)
        finding = Finding(
            self.name,
            self.rank,
            first.epoch,
            first.update,
            first.step,
            what,
            [one.number for one in losses],
            [float(one.loss) for one in losses],
        )
        leave_report(run, finding, first.batch)
        message = f"The loss is {value}" if what == "loss" else f"The {what} are not finite (the loss is {value})"
        return nonfinite_error(run, message, first)

    def metrics(self, run: Training) -> dict[str, float]:
        """Return no metrics."""
        return {}


@dataclass
class CheckBeforeStep(Stop):
    """Checks losses and gradients of each update before its step, by one read of the device.

    Without the read, log window, average, batch norm and report would have to take back a batch that others followed.
    """

    def before_update(self, run: Training) -> None:
        self.losses = []

    def after_forward(self, run: Training, batch: Batch, loss: torch.Tensor) -> None:
        self.losses.append(_batch_loss(run, loss, batch))

    def unchecked(self) -> Sequence[BatchLoss]:
        """Return none: each update checks its own."""
        return []

    def after_log(self, run: Training, loss: float, losses: Sequence[BatchLoss], at: Position) -> None:
        """Does nothing."""

    def find_bad(self, run: Training) -> tuple[str, int]:
        """Return what of the update is not finite (``loss``, ``gradients`` or ''), and the worker that reports it."""
        losses = ~torch.isfinite(torch.stack([one.loss for one in self.losses])).all()
        flags = torch.zeros(self.size + 1, dtype=torch.float64, device=losses.device)
        flags[self.rank], flags[-1] = losses, _gradients_are_bad(run)
        if self.together and self.size > 1:
            flags = run.strategy.all_reduce_sum(flags)
        *bad, gradients = flags.cpu().tolist()  # the one wait of an update
        if any(bad):
            return "loss", bad.index(1.0)
        return "gradients" if gradients else "", 0 if self.together else self.rank

    def find_source(self, run: Training) -> int:
        """Return the first worker whose own batches give such gradients when computed again; else worker 0."""
        from trainer.worker.nonfinite_report import gives_bad_gradients

        flags = torch.zeros(self.size, dtype=torch.float64)
        flags[self.rank] = any(gives_bad_gradients(run, one.batch) for one in self.losses if one.batch is not None)
        flags = run.strategy.all_reduce_sum(flags)
        return int(flags.argmax())

    def end(self, run: Training, what: str, worker: int) -> NotFinite:
        """Write the report about an update that is not finite; returns the error to raise."""
        bad = _first_bad(self.losses) if what == "loss" else None
        losses = self.losses if bad is None else self.losses[bad : bad + 1]
        first = losses[0]
        if what == "gradients" and self.together and self.size > 1:  # the exchange has given them to all workers
            worker = self.find_source(run)
        if worker == self.rank:
            error = self.report(run, losses, what)
        else:
            verb = "is" if what == "loss" else "are"
            error = nonfinite_error(run, f"The {what} of worker {worker} {verb} not finite", first)
        if self.together and self.size > 1:
            _wait_for_report(run)
        return error


@dataclass
class Rewind(CheckBeforeStep):
    """``on_nonfinite=rewind``: raises before a step that is not finite; the launcher then resumes from a checkpoint."""

    name = "rewind"

    def after_backward(self, run: Training) -> bool:
        what, worker = self.find_bad(run)
        if what:
            raise self.end(run, what, worker)
        return True


@dataclass
class Skip(CheckBeforeStep):
    """``on_nonfinite=skip``: skips a step that is not finite, on all workers if they take the same step.

    Attributes:
        buffers: the model's buffers before the update; a forward changes the statistics of batch norm.
        meter: batches of the log window before the update.
    """

    name = "skip"
    buffers: list[torch.Tensor] = field(default_factory=list)
    meter: list[Any] = field(default_factory=list)

    @torch.no_grad()
    def before_update(self, run: Training) -> None:
        super().before_update(run)
        self.meter = run.reporting.window.meter.state()
        live = list(run.model.buffers())
        if len(self.buffers) != len(live):
            self.buffers = [buffer.clone() for buffer in live]
        elif live:
            torch._foreach_copy_(self.buffers, live)

    def after_backward(self, run: Training) -> bool:
        what, worker = self.find_bad(run)
        progress = run.progress
        if not what:
            progress.skipped_in_a_row = 0
            return True
        if progress.skipped_in_a_row >= MOST_SKIPS:
            error = self.end(run, what, worker)
            message = f"{MOST_SKIPS} updates in a row were skipped (on_nonfinite=skip). {error}"
            raise NotFinite(message, error.step, error.epoch, error.update)
        self.undo_update(run)
        progress.skipped += 1
        progress.skipped_in_a_row += 1
        if progress.skipped <= MOST_LINES:
            rest = f"; further ones are counted in {SKIPPED}" if progress.skipped == MOST_LINES else ""
            verb = "is" if what == "loss" else "are"
            print(f"update {progress.step + 1} is skipped: its {what} {verb} not finite{rest}", flush=True)
        return False

    @torch.no_grad()
    def undo_update(self, run: Training) -> None:
        """Restore what the forwards of the update have changed."""
        for buffer, before in zip(run.model.buffers(), self.buffers, strict=True):
            buffer.copy_(before)
        run.reporting.window.meter.load(self.meter)
        run.reporting.window.last_batch = None
        if run.watchers.ema is not None:  # the average does not follow an update that changed nothing
            run.watchers.ema.step = run.progress.step + 1

    def metrics(self, run: Training) -> dict[str, float]:
        """Return the number of skipped updates, summed over workers if each skips its own."""
        total = float(run.progress.skipped)
        if not self.together and run.lockstep:
            total = run.strategy.all_reduce_sum(torch.tensor([total], dtype=torch.float64)).item()
        return {SKIPPED: total} if total else {}


STEP_HOOKS = {hook.name: hook for hook in (Stop, Skip, Rewind)}
"""By the value of ``on_nonfinite``."""


def check_parameters(run: Training) -> None:
    """Refuse to save a checkpoint of parameters that are NaN or infinite: no run could resume from it.

    Raises:
        NotFinite: a parameter is not finite.
    """
    greatest = _greatest([local(p.detach()) for p in run.model.parameters() if p.requires_grad])
    if greatest is not None and not torch.isfinite(greatest).all():
        first, *others = not_finite_parameters(run.model)
        names = f"{first} and {counted(len(others), 'other')}" if others else first
        message = f"The parameters are not finite ({names}), so no checkpoint is made of them,"
        raise nonfinite_error(run, message, report=False)


def nonfinite_error(run: Training, message: str, at: Position | None = None, report: bool = True) -> NotFinite:
    """Make the error about a loss or gradient that is not finite.

    Args:
        at: batch to blame; None: it is unknown, and the error names the last update.
        report: name the report in the error.
    """
    progress = run.progress
    step, number = progress.step, run.reporting.window.batch_in_epoch
    epoch, update = progress.epoch, max(0, progress.update - 1)
    if at is not None:
        step, number, epoch, update = at.step, at.number, at.epoch, at.update
    run_dir = run.reporting.run_dir
    where = f"\nreport: {run_dir / REPORT}" if report and run_dir is not None else ""
    message = f"{message} at update {step} (epoch {epoch}, batch {number}). {ADVICE}{where}"
    return NotFinite(message, step, epoch, update)


def _wait_for_report(run: Training) -> None:
    """Meet all workers, so that none ends the run before the report is written."""
    run.strategy.all_reduce_sum(torch.zeros(1, dtype=torch.float64))


def _batch_loss(run: Training, loss: torch.Tensor, batch: Batch | None = None) -> BatchLoss:
    progress, number = run.progress, run.reporting.window.batch_in_epoch + 1
    return BatchLoss(progress.epoch, progress.update, progress.step + 1, number, loss.detach(), batch)


def _first_bad(losses: Sequence[BatchLoss]) -> int | None:
    if not losses:
        return None
    finite = torch.isfinite(torch.stack([one.loss for one in losses])).tolist()
    return finite.index(False) if not all(finite) else None


def _gradients_are_bad(run: Training) -> float | torch.Tensor:
    """Whether a gradient is not finite. With a GradScaler return 0: it skips steps with inf itself."""
    if getattr(getattr(run.strategy, "updater", None), "scaler", None) is not None:
        return 0.0
    found = [p.grad for p in run.model.parameters() if p.grad is not None]
    greatest = _greatest([g.coalesce().values() if g.is_sparse else local(g) for g in found])
    return 0.0 if greatest is None else ~torch.isfinite(greatest).all()


def _greatest(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the greatest magnitude in each tensor: NaN or infinity if the tensor has one."""
    filled = [t for t in tensors if t.numel()]
    if not filled:
        return None
    norms = list(torch._foreach_norm(filled, math.inf))  # type: ignore[arg-type]
    if len({(norm.dtype, norm.device) for norm in norms}) > 1:
        norms = [norm.double().to(filled[0].device) for norm in norms]
    return torch.stack(norms).double()
