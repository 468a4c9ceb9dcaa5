"""Lets a restarted worker begin at the checkpoint that the others have just saved."""

from __future__ import annotations

from trainer.checkpoint import durable_folder, store
from trainer.errors import RunFailed
from trainer.strategies.contract import Seat
from trainer.strategies.stopping import TakesBack
from trainer.worker.checkpoints import Checkpoints, resume
from trainer.worker.loop import Training
from trainer.worker.returned import NOBODY, TooLate, let_in, wait_for


def come_back(run: Training, seat: Seat) -> None:
    """Wait to be let in; then restore the first worker's checkpoint, with the servers' current parameters.

    Raises:
        RunFailed: the run was over before, or the checkpoint is not written.
    """
    kept, strategy = run.checkpoints, run.strategy
    if not isinstance(kept, Checkpoints) or not isinstance(strategy, TakesBack):
        raise RunFailed("a worker comes back at a checkpoint of the others, and this run has none")
    asked, meeting, stop = let_in(seat, strategy.pause)
    if (found := strategy.come_back((meeting, stop))) is None:
        raise TooLate(NOBODY)
    number, writer = found
    folder, kept.asked = store.folder_of(kept.folder, number), asked + 1
    wait_for((folder / durable_folder.MARKER).is_file, seat, folder.name, writer, strategy.pause)
    resume(run, folder, seat)
    run.samples, run.line.before = 0, None  # the first worker counts its own
    strategy.take_part()
    print(f"takes part again after update {run.step}", flush=True)
