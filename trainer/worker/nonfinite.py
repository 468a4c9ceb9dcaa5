"""``on_nonfinite``: stops, rewinds or skips when a loss or gradient is NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from trainer.errors import NotFinite
from trainer.run_folder.reset_files import REPORT
from trainer.wording import counted
from trainer.worker.nonfinite_report import Finding, gives_bad_gradients, leave_report, not_finite

if TYPE_CHECKING:
    from trainer.data.feed import Batch
    from trainer.worker.loop import Training

MOST_SKIPS = 100
"""So many updates in a row are left out; the next one that is not finite ends the run."""
TOLD = 5
"""Each of the first skipped updates has a line; the others are counted."""
ADVICE = "A lower optimizer.lr, a warm-up (scheduler.warmup_epochs) or strategy.clip_norm=1.0 usually helps."


@dataclass(frozen=True)
class Seen:
    """A batch whose loss was computed, and its place in the run.

    Attributes:
        epoch, update: in which it is, and of the epoch's updates which one, from 0; step: the run's update, from 1.
        number: of the batch in its epoch.
        loss: its mean loss (); batch: itself; None: it is not kept.
    """

    epoch: int
    update: int
    step: int
    number: int
    loss: torch.Tensor
    batch: Batch | None = None


@dataclass
class Stop:
    """``on_nonfinite=stop``: ends the run at the first batch whose loss is NaN or infinite, with a report.

    On a CPU each loss is looked at when it is there. On a GPU that would wait for it, so that the losses are looked at
    when a line of the log has to wait anyway.

    Args:
        rank, size: this worker's number, and how many there are.
        together: all workers take the same step, or none.
    """

    rank: int = 0
    size: int = 1
    together: bool = False
    name = "stop"
    seen: list[Seen] = field(default_factory=list)

    def would_wait(self, loss: torch.Tensor) -> bool:
        """Whether reading a loss now would wait for the device."""
        return loss.device.type != "cpu"

    def begin(self, run: Training) -> None:
        """Called before an update's first forward."""

    def look(self, run: Training, batch: Batch, loss: torch.Tensor) -> None:
        """Check a batch's loss after its forward.

        Raises:
            NotFinite: its loss is not finite.
        """
        if self.would_wait(loss):
            self.seen.append(_seen(run, loss))
        elif not math.isfinite(loss.item()):
            raise self.found(run, [_seen(run, loss, batch)])

    def step(self, run: Training, samples: int) -> None:
        """Take the update's step; subclasses refuse or skip a step that is not finite."""
        run.strategy.step(samples)

    def line(self, run: Training, loss: float) -> None:
        """Check the loss of a log line: the mean over all workers if these are in lockstep.

        Raises:
            NotFinite: it is not finite.
        """
        seen, self.seen = self.seen, []
        if math.isfinite(loss):
            return
        bad = _first_bad(seen)
        if bad is not None or not run.lockstep:
            error = self.found(run, seen[bad or 0 :][:1], loss=loss)
        else:
            error = self.error(run, f"The loss is {loss}")
        if run.lockstep:  # nobody ends before the report is there
            run.strategy.all_reduce_sum(torch.zeros(1, dtype=torch.float64))
        raise error

    def found(self, run: Training, seen: Sequence[Seen], what: str = "loss", loss: float = math.nan) -> NotFinite:
        """Write the report about these batches, the first of which is to blame; returns the error to raise."""
        if not seen:
            return self.error(run, f"The loss is {loss}", report=False)
        first = seen[0]
        value = float(first.loss)
        said = f"The loss is {value}" if what == "loss" else f"The {what} are not finite (the loss is {value})"
        told = Finding(
            self.name,
            self.rank,
            first.epoch,
            first.update,
            first.step,
            what,
            [s.number for s in seen],
            [float(s.loss) for s in seen],
        )
        leave_report(run, told, first.batch)
        return self.error(run, said, first)

    def error(self, run: Training, said: str, at: Seen | None = None, report: bool = True) -> NotFinite:
        """Make the error for a loss or gradient that is not finite; it names the report.

        Args:
            at: the batch to blame; None: it is not known, and the update that was done last is named.
            report: there is one.
        """
        step, number, epoch, update = run.step, run.line.number, run.epoch, max(0, run.update - 1)
        if at is not None:
            step, number, epoch, update = at.step, at.number, at.epoch, at.update
        where = f"\nreport: {run.run_dir / REPORT}" if report and run.run_dir is not None else ""
        return NotFinite(
            f"{said} at update {step} (epoch {epoch}, batch {number}). {ADVICE}{where}", step, epoch, update
        )

    def skipped(self, run: Training) -> dict[str, float]:
        """The number of updates skipped so far, as a metric for each log line; {} if none was."""
        return {}


@dataclass
class LooksBeforeStep(Stop):
    """Checks losses and gradients of each update before its step, which waits for them."""

    def begin(self, run: Training) -> None:
        self.seen = []

    def look(self, run: Training, batch: Batch, loss: torch.Tensor) -> None:
        self.seen.append(_seen(run, loss, batch))

    def line(self, run: Training, loss: float) -> None:
        pass

    def blame(self, run: Training) -> tuple[str, int]:
        """Return what in the update is not finite (``loss``, ``gradients`` or ''), and which worker must report it."""
        losses = ~torch.isfinite(torch.stack([s.loss for s in self.seen])).all()
        flags = torch.zeros(self.size + 1, dtype=torch.float64, device=losses.device)
        flags[self.rank], flags[-1] = losses, _gradients_are_bad(run)
        if self.together and self.size > 1:
            flags = run.strategy.all_reduce_sum(flags)
        *bad, gradients = flags.tolist()
        if any(bad):
            return "loss", bad.index(1.0)
        return "gradients" if gradients else "", 0 if self.together else self.rank

    def source(self, run: Training) -> int:
        """The first worker whose own batches give such gradients when they are computed again; else worker 0."""
        flags = torch.zeros(self.size, dtype=torch.float64)
        flags[self.rank] = any(gives_bad_gradients(run, seen.batch) for seen in self.seen if seen.batch is not None)
        flags = run.strategy.all_reduce_sum(flags)
        return int(flags.argmax())

    def end(self, run: Training, what: str, worker: int) -> NotFinite:
        """Write the report about an update that is not finite; returns the error to raise."""
        bad = _first_bad(self.seen) if what == "loss" else None
        seen = self.seen if bad is None else self.seen[bad : bad + 1]
        first = seen[0]
        if what == "gradients" and self.together and self.size > 1:  # after the exchange all workers have them
            worker = self.source(run)
        if worker == self.rank:
            error = self.found(run, seen, what)
        else:
            said = f"The {what} of worker {worker} {'is' if what == 'loss' else 'are'} not finite"
            error = self.error(run, said, first)
        if self.together and self.size > 1:
            run.strategy.all_reduce_sum(torch.zeros(1, dtype=torch.float64))
        return error


@dataclass
class Rewind(LooksBeforeStep):
    """``on_nonfinite=rewind``: raises before a step that is not finite; the launcher then resumes from a checkpoint."""

    name = "rewind"

    def step(self, run: Training, samples: int) -> None:
        what, worker = self.blame(run)
        if what:
            raise self.end(run, what, worker)
        run.strategy.step(samples)


@dataclass
class Skip(LooksBeforeStep):
    """``on_nonfinite=skip``: leaves out a step that is not finite, on all workers if these take the same step.

    Attributes:
        buffers: the model's before the update; a forward changes batch-norm's statistics.
        meter: what the next line averages without the update.
    """

    name = "skip"
    buffers: list[torch.Tensor] = field(default_factory=list)
    meter: list[Any] = field(default_factory=list)

    @torch.no_grad()
    def begin(self, run: Training) -> None:
        super().begin(run)
        self.meter = run.line.meter.state()
        live = list(run.model.buffers())
        if len(self.buffers) != len(live):
            self.buffers = [buffer.clone() for buffer in live]
        elif live:
            torch._foreach_copy_(self.buffers, live)

    def step(self, run: Training, samples: int) -> None:
        what, worker = self.blame(run)
        if not what:
            run.in_a_row = 0
            run.strategy.step(samples)
            return
        if run.in_a_row >= MOST_SKIPS:
            error = self.end(run, what, worker)
            raise NotFinite(
                f"{MOST_SKIPS} updates in a row were skipped (on_nonfinite=skip). {error}",
                error.step,
                error.epoch,
                error.update,
            )
        self.leave_out(run, samples)
        run.skipped += 1
        run.in_a_row += 1
        if run.skipped <= TOLD:
            rest = "; further ones are counted in train/skipped" if run.skipped == TOLD else ""
            print(
                f"update {run.step + 1} is skipped: its {what} {'is' if what == 'loss' else 'are'} not finite{rest}",
                flush=True,
            )

    @torch.no_grad()
    def leave_out(self, run: Training, samples: int) -> None:
        """Restore everything as it was before the update, except its place in the schedule."""
        run.strategy.skip(samples)
        for buffer, before in zip(run.model.buffers(), self.buffers, strict=True):
            buffer.copy_(before)
        run.line.meter.load(self.meter)
        run.line.last = None
        if run.ema is not None:
            run.ema.step = run.step + 1

    def skipped(self, run: Training) -> dict[str, float]:
        total = float(run.skipped)
        if not self.together and run.lockstep:
            total = run.strategy.all_reduce_sum(torch.tensor([total], dtype=torch.float64)).item()
        return {"train/skipped": total} if total else {}


KINDS = {kind.name: kind for kind in (Stop, Skip, Rewind)}
"""By the value of ``on_nonfinite``."""


def check_parameters(run: Training) -> None:
    """Refuse to make a checkpoint of parameters that are NaN or infinite: no run could resume from it.

    Raises:
        NotFinite: they are not finite.
    """
    trained = [p.detach() for p in run.model.parameters() if p.requires_grad]
    if not _are_finite(trained):
        first, *others = not_finite(run.model)
        names = f"{first} and {counted(len(others), 'other')}" if others else first
        said = f"The parameters are not finite ({names}), so no checkpoint is made of them,"
        raise run.guard.error(run, said, report=False)


def _seen(run: Training, loss: torch.Tensor, batch: Batch | None = None) -> Seen:
    return Seen(run.epoch, run.update, run.step + 1, run.line.number + 1, loss.detach(), batch)


def _first_bad(seen: Sequence[Seen]) -> int | None:
    if not seen:
        return None
    finite = torch.isfinite(torch.stack([s.loss for s in seen])).tolist()
    return finite.index(False) if not all(finite) else None


def _gradients_are_bad(run: Training) -> float | torch.Tensor:
    """Of the fp16 loss scale's doing, they are its own matter."""
    if getattr(getattr(run.strategy, "updater", None), "scaler", None) is not None:
        return 0.0
    found = [p.grad for p in run.model.parameters() if p.grad is not None]
    greatest = _greatest([g.coalesce().values() if g.is_sparse else g for g in found])
    return 0.0 if greatest is None else ~torch.isfinite(greatest).all()


def _are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    greatest = _greatest(tensors)
    return greatest is None or bool(torch.isfinite(greatest).all())


def _greatest(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The greatest magnitude in each tensor: NaN and infinity where it has one."""
    there = [t for t in tensors if t.numel()]
    if not there:
        return None
    norms = torch._foreach_norm(there, math.inf)  # type: ignore[arg-type]
    return torch.stack([norm.double().to(there[0].device) for norm in norms])
