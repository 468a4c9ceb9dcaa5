"""When and how a worker saves its part of a checkpoint: after the same update on all workers, in the background."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import durable_folder, store
from trainer.checkpoint.best_weights import BestOfCheckpoints
from trainer.checkpoint.durable_folder import final_folder, life_folder
from trainer.checkpoint.pinned import PinnedMemory
from trainer.checkpoint.tensor_tree import Packed
from trainer.checkpoint.writer import BackgroundWriter, complete, write_part
from trainer.config.schema import CheckpointConfig
from trainer.errors import Preempted, RunFailed, why
from trainer.host.signals import LEAVE, StopRequest
from trainer.run_folder import tracking_file
from trainer.run_folder.json_files import leave
from trainer.strategies.lost_workers import HaltsWhileWaiting, Readmits, is_lost, was_lost
from trainer.strategies.seat import Seat
from trainer.worker.nonfinite import check_parameters
from trainer.worker.returned import NOT_WRITTEN, Returned
from trainer.worker.shared_folder import life_of
from trainer.worker.state import BeforeValidation, common_state, save_state
from trainer.worker.training import Training
from trainer.worker.training_log import read_line

SLOW_S = 1.0
"""Longest wait of the training for the write of the last checkpoint; after it this checkpoint is left out."""
DATA = "data"
"""The note with the fingerprint of the data."""
HUNG_S = 3.0
"""Longest wait for parts of other workers if some of them hang."""
REPORT_EVERY_S = 60.0
"""Least time between two lines about checkpoints."""


class Checkpoints:
    """Saves this worker's part of each checkpoint when one is due.

    All workers save after the same update. ``every_steps`` names this update by itself. A clock or a signal does not,
    so the first worker decides: it writes on the board the number of an update at which all workers meet, and each
    worker has read the note by the end of that update.

    Workers without a common step (``lockstep=False``) have no such update. The first worker leaves a note. Each worker
    that finds it, after an update or while it waits for others, waits until all have stopped.

    Args:
        folder: ``checkpoints`` in the run's folder.
        settings: config group ``checkpoint``.
        shared: all workers hold the same parameters.
        updates: updates of an epoch. epochs: epochs of the run.
        about: facts of the run for checkpoint.json, without its position.
        patience_s: longest wait for parts of other workers.
        apart: this host's own folder, where hosts do not share the run's: parts come to host 0 by the board. None: they
        share it.

    Attributes:
        sends: this worker sends its parts to host 0.
        updates_done: this process has done an update, so that the run can be asked to save and end. request: a signal
        that asks for this; None: no signal is taken. before: the state before the running validation; None: none runs.
        cut: this worker has left out the rest of its share of the validation. waits_at: number of the meeting at
        which workers without a common step wait when they have done their shares of a validation. All may leave there,
        because another meeting follows before the validation is over.
    """

    def __init__(
        self,
        folder: Path,
        settings: CheckpointConfig,
        seat: Seat,
        shared: bool,
        updates: int,
        epochs: int,
        about: Mapping[str, Any],
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
        apart: Path | None = None,
    ) -> None:
        self.folder, self.settings, self.seat, self.shared, self.about = folder, settings, seat, shared, about
        self.apart, self.sends = apart, apart is not None and seat.rank != seat.local_rank
        self._leave_status({"state": "starting"})
        self.updates, self.epochs, self.life = updates, epochs, life_of(seat)
        self.patience_s, self.clock = patience_s, clock
        self.board = seat.store.under("checkpoint")
        self._returned = Returned(self.board)
        if seat.rank == 0:
            self.board.set(DATA, str(about.get("data", "")))
        self.asked = 0
        self.target: int | None = None
        self.saved = self.saved_after = -1
        self.saved_at = clock()
        self.writer = BackgroundWriter(settings.background)
        self.pinned = PinnedMemory()
        self.best = BestOfCheckpoints()
        self.reported_at = -REPORT_EVERY_S
        self.given_up: list[Path] = []
        self.others_hang = False
        self.leaving = False
        self.updates_done = False
        self.forwarded = False
        self.request: StopRequest | None = None
        self.before: BeforeValidation | None = None
        self.cut = False
        self.waits_at = -1

    # --- when ------------------------------------------------------------------------------------------------------

    def after_update(self, run: Training) -> None:
        """Save after an update if a checkpoint is due."""
        if not self.updates_done:
            self._leave_status({"state": "running", "life": 1})
        self.updates_done = True
        if not run.lockstep:
            self.check_due(run)
            return
        self._ask(run)
        if run.progress.step == self.target or (self._is_due(run) and not self._epoch_is_due(run)):
            self._take(run, run.progress.epoch)
        if run.progress.step == self.target:
            self._finish_request()

    def after_epoch(self, run: Training) -> None:
        """Save after an epoch if a checkpoint is due, unless the epoch's last update has saved already."""
        if not run.lockstep:
            if self._ends(run.progress.epoch):
                if isinstance(run.strategy, HaltsWhileWaiting):
                    run.strategy.meet()  # early workers wait at a meeting, where the first one can still stop all
                self._take(run, self._next(run))
        elif run.progress.step != self.saved and (self._ends(run.progress.epoch) or self._is_due(run)):
            self._take(run, self._next(run))

    @contextmanager
    def validating(self, run: Training) -> Iterator[None]:
        """Context manager around a validation. A run may leave it, and then repeats it in its next life."""
        self.before, self.cut = BeforeValidation(run, self.seat.size == 1), False
        try:
            yield
        finally:
            self.before = None

    def breaks_off(self, run: Training) -> bool:
        """Called between two batches of a validation. True leaves out the rest of this worker's share, so that the run
        ends within the grace time. Workers without a common step stop here instead."""
        if not run.lockstep:
            self.check_due(run)
            return False
        self._forward_request()
        self.cut = self._is_asked_to_leave()
        return self.cut

    def after_share(self, run: Training) -> torch.Tensor:
        """Called after a worker's share of a validation, before the workers add up their sums."""
        self.waits_at = _meetings(run) + 1
        return torch.tensor([float(self.cut)], dtype=torch.float64)

    def after_shares(self, run: Training, cut: torch.Tensor) -> None:
        """Called with the sum over the workers. In lockstep all leave if one left out a part.

        Raises:
            Preempted: the run is to end now.
        """
        if run.lockstep and cut.item():
            self.leaving = True
            if run.progress.step != self.saved:
                self._take(run, run.progress.epoch)
            self._finish_request()

    def check_due(self, run: Training, decides: bool = True) -> None:
        """For asynchronous workers between updates: the first one asks for a checkpoint, the others read its note.

        Args:
            decides: the first may say so now.
        """
        self._forward_request()
        waits = not decides and _meetings(run) == self.waits_at
        leads = (decides or waits) and _leads(run)
        if leads and (leaving := self._decides(run)) is not None and self._may_write(key := f"stop/{self.asked}"):
            self.board.set(key, f"{int(leaving)} {_meetings(run) - waits}")
            if not leaving and isinstance(run.strategy, Readmits):  # all stop now, whatever happens to this worker
                self._returned.let_in(run.strategy, self.asked)
        if self.board.check([f"stop/{self.asked}"]) and (decides or _meetings(run) > self._asked()[1]):
            self._take(run, run.progress.epoch)
            self.leaving = bool(self._asked()[0])
            self._finish_request()

    def _decides(self, run: Training) -> bool | None:
        """Whether all workers leave after saving; None: no checkpoint is due."""
        if self._is_asked_to_leave():
            return True
        if self.before is not None:
            return None
        every = self.settings.every_steps
        due = self._late() or (every is not None and run.progress.step // every > max(0, self.saved_after) // every)
        return False if (due or self._returned.waits()) and self.writer.wait(0.0) else None

    def _asked(self) -> tuple[int, int]:
        """Read the first worker's note: whether all workers leave, and at how many meetings the first worker had been.
        A worker that waits at one of these meetings stops later. Otherwise its checkpoint would have a position before
        the meeting, and those of the others a position after it."""
        leaving, meetings = self.board.get(f"stop/{self.asked}").split()
        return int(leaving), int(meetings)

    def _is_due(self, run: Training) -> bool:
        every = self.settings.every_steps
        return every is not None and run.progress.step % every == 0

    def _epoch_is_due(self, run: Training) -> bool:
        """Whether this was the last update of an epoch that ends with a checkpoint."""
        return run.progress.update == self.updates and self._ends(run.progress.epoch)

    def _ends(self, epoch: int) -> bool:
        every = self.settings.every_epochs
        return every is not None and ((epoch + 1) % every == 0 or epoch + 1 == self.epochs)

    def _next(self, run: Training) -> int:
        """The epoch in which the run goes on. An epoch that max_steps has cut is not over, because a resumed run may
        have a larger max_steps."""
        return run.progress.epoch if run.over and run.progress.update < self.updates else run.progress.epoch + 1

    def _ask(self, run: Training) -> None:
        """The first worker writes at which update all workers save; the others read it."""
        if self.target is not None:
            if run.progress.step <= self.target:
                return
            # its writer was stopped, counted as lost, and woke too late
            self.asked, self.target, self.leaving = self.asked + 1, None, False
        key = f"after/{self.asked}"
        self._forward_request()
        if _is_first(run):
            leaving = self._is_asked_to_leave()
            if not (leaving or self._late()):
                return
            if self._may_write(key):
                target = run.progress.step if self.seat.size == 1 else run.strategy.next_meeting(run.progress.step)
                self.board.set(key, f"{target} {int(leaving)}")
        if self.board.check([key]):  # the writer may have been a first worker that is lost by now
            target, leaves = map(int, self.board.get(key).split())
            self.target, self.leaving = target, bool(leaves)

    def _may_write(self, key: str) -> bool:
        """Whether this worker may write the note ``key``: nobody else has written it, and the others have not given up
        this worker."""
        return not self.board.check([key]) and not was_lost(self.seat.store, self.seat.rank)

    def _forward_request(self) -> None:
        """Tell the other workers that this one was asked to leave."""
        if self.request and not self.forwarded:
            self.seat.store.set(LEAVE, "")
            self.forwarded = True

    def _is_asked_to_leave(self) -> bool:
        return bool(self.request) or bool(self.seat.store.check([LEAVE]))

    def _late(self) -> bool:
        every = self.settings.every_minutes
        return every is not None and self.clock() - self.saved_at >= 60 * every

    def _finish_request(self) -> None:
        """Begin to wait for the next request, after a checkpoint; end the run if it was asked to leave.

        Raises:
            Preempted: the run is to end now.
        """
        self.asked, self.target = self.asked + 1, None
        if self.leaving:
            self.writer.wait()
            raise Preempted

    # --- how -------------------------------------------------------------------------------------------------------

    def _take(self, run: Training, epoch: int) -> None:
        """Copy this worker's part and write it. In a validation, save the state before the validation.

        Raises:
            NotFinite: the parameters are not finite.
        """
        with nullcontext() if self.before is None else self.before.restored(run):
            self._copy(run, epoch)

    def _copy(self, run: Training, epoch: int) -> None:
        read_line(run)  # its point is before the checkpoint
        check_parameters(run)
        began = self.clock()
        needed = self.leaving or not _is_first(run) or epoch == self.epochs or run.over or run.strategy.halts
        if not self.writer.wait(SLOW_S):
            what = "the checkpoint waits" if needed else "no checkpoint"
            print(f"{what} at update {run.progress.step}: the one before is still being written", flush=True)
            if not needed:
                return
            self.writer.wait()
        number = run.strategy.halt(run.progress.step if run.lockstep else max(run.progress.step, self.saved + 1))
        folder = life_folder(store.folder_of(self.folder, number), self.life)
        with run.strategy.evaluated():
            share = run.strategy.save(folder)
            first = _is_first(run) if share.workers is None else self.seat.rank == share.workers[0]
            pieces = None if first or not self.shared else common_state(run, share)
            try:
                packed = Packed(vars(save_state(run, share, epoch, pieces is None)), self.pinned, pieces)
            except TypeError as error:  # raised by the state of a user's callback
                raise RunFailed(f"no checkpoint can be saved: {error}") from error
        about = ""
        run.reporting.set_writer(first)
        if first:
            about = json.dumps({**self.about, **_position(run, epoch), "step": number, **self._known()}, indent=1)
            if run.reporting.report.watched.value is not None:
                _try_best(lambda: self.best.hold(folder))
        self.saved, self.saved_after, self.saved_at = number, run.progress.step, self.clock()
        waited = self.saved_at - began
        workers = range(self.seat.size) if share.workers is None else share.workers
        names = [*(store.part_of(worker) for worker in workers), *share.files]
        self.writer.begin(lambda: self._write(run, folder, packed, about, names, waited))

    def _write(
        self, run: Training, folder: Path, packed: Packed, about: str, names: Sequence[str], waited: float
    ) -> None:
        """Write this worker's part, in the background; the first worker also completes the checkpoint.

        Args:
            about: for checkpoint.json; empty: another worker completes the checkpoint.
            names: of the checkpoint's files.
        """
        began, name, place = self.clock(), store.part_of(self.seat.rank), final_folder(folder)
        failed = write_part(folder, name, packed)
        if self.sends:
            from trainer.worker.parts_of_hosts import send

            failed = send(self.seat.store, folder, name, failed, lambda: self._is_given_up(place))
        if not about:
            if failed:
                print(failed, flush=True)
            return
        failed = failed or run.reporting.report.unwritten()
        _try_best(lambda: self.best.seal(folder))
        if self.apart is not None:
            from trainer.worker.parts_of_hosts import receive

            others = [part for part in names if self._is_of_another_host(part)]
            received = (receive(self.seat.store, folder, part, self.patience_s, self._is_gone) for part in others)
            failed = failed or next(filter(None, received), "")
        failed = failed or complete(folder, about, names, self.patience_s, self._is_gone)
        if failed:
            self.given_up.append(folder)
            durable_folder.begin(folder)
            self.board.set(NOT_WRITTEN.format(place.name), failed)
            print(f"no checkpoint at {place.name}: {failed}; the one before stays, and it is tried again", flush=True)
            return
        try:
            store.retire(self.folder, place, self.settings.keep_last, self.settings.keep_best)
        except OSError as error:
            print(f"older checkpoints cannot be removed: {why(error)}", flush=True)
        if began >= self.reported_at + REPORT_EVERY_S:
            self.reported_at = began
            # the best weights are a link
            size = (durable_folder.bytes_of(place) - durable_folder.bytes_of(place, store.BEST)) / 1e6
            took = self.clock() - began
            print(
                f"checkpoint {place.name}: {size:.1f} MB, written in {took:.2f} s; the training waited {waited:.3f} s",
                flush=True,
            )

    def _known(self) -> dict[str, str]:
        """Facts that are known only after the start: the id of the MLflow run, and the data's fingerprint. Host 0
        computes the fingerprint; a first worker on another host reads it from the board."""
        data = self.board.get(DATA).decode() if self.board.check([DATA]) else ""
        return {"data": data, "run_id": tracking_file.position(self.folder.parent).id or ""}

    def _leave_status(self, status: Mapping[str, Any]) -> None:
        """Tell the launcher of this host whether there is something to save, where it does not see host 0's status."""
        if self.apart is not None and self.sends and self.seat.local_rank == 0:
            leave(self.apart / "status.json", status)

    def _is_given_up(self, place: Path) -> bool:
        return self.board.check([NOT_WRITTEN.format(place.name)]) or is_lost(self.seat.store, 0)

    def _is_of_another_host(self, name: str) -> bool:
        """Whether a worker of another host writes the part ``name``; servers bring their parts by themselves."""
        number = name.partition(".")[0].removeprefix("worker-")
        return number.isdecimal() and int(number) >= self.seat.local_size

    def _is_gone(self, name: str) -> bool:
        """Whether the worker that writes the part ``name`` was lost or hangs."""
        rank = name.partition(".")[0].removeprefix("worker-")
        return self.others_hang or (rank.isdecimal() and is_lost(self.seat.store, int(rank)))

    def close(self, others_hang: bool = False, failed: bool = False) -> None:
        """Wait until everything is written, but not for parts of workers that hang, and if the run has failed, not for
        copies of a GPU that may hang. Remove what servers have left of checkpoints that were given up."""
        late = (others_hang or failed) and not self.writer.wait(HUNG_S)
        self.others_hang, self.pinned.hangs = others_hang and late, failed and late
        self.writer.wait()
        for folder in self.given_up:
            durable_folder.begin(folder)


def _try_best(hold: Callable[[], None]) -> None:
    """Run ``hold``; on a full disk the checkpoint has no best weights."""
    try:
        hold()
    except OSError as error:
        print(f"the best weights so far are not in this checkpoint: {why(error)}", flush=True)


def _position(run: Training, epoch: int) -> dict[str, Any]:
    """The run's position for checkpoint.json: updates, epoch, samples, and the metric that marks the best model."""
    watched, (validated, metrics) = run.reporting.report.watched, run.progress.validated
    return {
        "updates": run.progress.step,
        "epoch": epoch,
        "update": run.progress.update if epoch == run.progress.epoch else 0,
        "samples": run.reporting.report.samples,
        "points": run.reporting.report.points,
        "best_step": watched.step if watched.value is not None else 0,
        "watched": {
            "metric": watched.metric,
            "value": metrics.get(watched.metric.partition("/")[2]) if validated == run.progress.step else None,
            "falls": watched.falls,
        },
    }


def _meetings(run: Training) -> int:
    """The number of meetings that this worker has come to, with the one at which it waits."""
    return run.strategy.meetings if isinstance(run.strategy, HaltsWhileWaiting) else 0


def _is_first(run: Training) -> bool:
    """Whether this worker is the first of those that take part now; the first decides when checkpoints are written."""
    return run.strategy.members()[0] == 0


def _leads(run: Training) -> bool:
    """Whether this worker is the first of those left, even if the one before was lost since the last meeting."""
    return run.strategy.leads() if isinstance(run.strategy, Readmits) else _is_first(run)
