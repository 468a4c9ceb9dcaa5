"""A restarted worker comes back: it waits to be let in, and begins at the checkpoint that the others have just
saved."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from trainer.checkpoint import durable_folder, store
from trainer.errors import RunFailed
from trainer.host.notes_board import Board
from trainer.strategies.lost_workers import ADMITTED, Readmits, is_lost
from trainer.strategies.seat import Seat
from trainer.worker.checkpoints import Checkpoints
from trainer.worker.resuming import resume
from trainer.worker.returned import COMES, LET_IN, NOT_WRITTEN
from trainer.worker.training import Training

NOBODY = "it has come back, and nobody is left who could let it in"
LOOK_S, TELL_S = 0.05, 1.0


class TooLate(RunFailed):
    """The error of a restarted worker that the run no longer needs; the run goes on."""

    ends_run = False


class Missed(TooLate):
    """The error of a restarted worker whose checkpoint was not written after all. Its next life can wait for the next
    checkpoint."""

    retryable = True


def come_back(run: Training, seat: Seat) -> None:
    """Wait to be let in; then restore the first worker's checkpoint, with the servers' current parameters.

    Raises:
        RunFailed: the run was over before, or the checkpoint is not written.
    """
    kept, strategy = run.watchers.checkpoints, run.strategy
    if not isinstance(kept, Checkpoints) or not isinstance(strategy, Readmits):
        raise RunFailed("a worker comes back at a checkpoint of the others, and this run has none")
    asked, meeting, stop = let_in(seat, strategy.pause)
    if (found := strategy.come_back((meeting, stop))) is None:
        raise TooLate(NOBODY)
    number, writer = found
    folder, kept.asked = store.folder_of(kept.folder, number), asked + 1
    wait_for((folder / durable_folder.MARKER).is_file, seat, folder.name, writer, strategy.pause)
    resume(run, folder, seat)
    run.progress.samples, run.reporting.window.last_sums = 0, None  # the first worker counts its own
    strategy.take_part()
    print(f"takes part again after update {run.progress.step}", flush=True)


def let_in(
    seat: Seat, sleep: Callable[[float], None] = time.sleep, now: Callable[[], float] = time.monotonic
) -> tuple[int, int, int]:
    """In a restarted worker: wait until another worker lets this one in. Returns the numbers of the last note that asks
    for a checkpoint, of the last meeting and of the last stop.

    Raises:
        TooLate: the run has ended before, or all others are lost; Missed: who let it in is.
    """
    board, said_at = seat.store.under("checkpoint"), -math.inf
    others = [rank for rank in range(seat.size) if rank != seat.rank]
    key = LET_IN.format(seat.rank, seat.life.number)
    while not board.check([key]):
        if any(seat.store.check([f"done/worker/{rank}"]) for rank in others):
            raise TooLate("it has come back, and the run was over before it could take part")
        if all(is_lost(seat.store, rank) for rank in others):
            raise TooLate(NOBODY)
        if _is_forgotten(seat, board, key):
            raise Missed("it has come back, and who let it in was lost before it could say from which checkpoint on")
        if now() - said_at >= TELL_S:
            board.set(COMES, f"{seat.rank} {seat.life.number}")
            if said_at == -math.inf:
                print("is there again, and waits to be let in", flush=True)
            said_at = now()
        sleep(LOOK_S)
    asked, meeting, stop = board.get(key).split()
    return int(asked), int(meeting), int(stop)


def _is_forgotten(seat: Seat, board: Board, key: str) -> bool:
    """Whether the servers count this worker in, but the worker that asked for it was lost before it could answer."""
    by = ADMITTED.format(seat.rank, seat.life.number)
    return bool(seat.store.check([by]) and is_lost(seat.store, int(seat.store.get(by))) and not board.check([key]))


def wait_for(
    written: Callable[[], bool], seat: Seat, name: str, writer: int, sleep: Callable[[float], None] = time.sleep
) -> None:
    """In a restarted worker: wait until the other workers have completed the checkpoint from which this one starts.

    Args:
        written: whether it is. name: its folder's. writer: rank of the worker that completes it.

    Raises:
        Missed: they cannot.
    """
    board, key = seat.store.under("checkpoint"), NOT_WRITTEN.format(name)
    while not written():
        if board.check([key]):
            raise Missed(f"it cannot come back without a checkpoint: {board.get(key).decode()}")
        if is_lost(seat.store, writer) and not written():
            raise Missed(f"it cannot come back without a checkpoint: worker {writer}, which wrote it, was lost")
        sleep(LOOK_S)
