"""How a worker that died and was restarted asks to be let in while the others go on, and how one of them does it."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainer.errors import RunFailed
from trainer.host.notes_board import Board
from trainer.strategies.contract import Seat
from trainer.strategies.stopping import ADMITTED, TakesBack, is_lost

COMES = "comes"
LET_IN = "lets-in/{}/{}"
NOT_WRITTEN = "not-written/{}"
NOBODY = "it has come back, and nobody is left who could let it in"
LOOK_S, TELL_S = 0.05, 1.0


class TooLate(RunFailed):
    """The error of a restarted worker that the run can do without; it does not end the run."""

    ends_run = False


class Returned:
    """The restarted workers that ask to be let in, as the other workers see them.

    Args:
        board: where workers leave notes about checkpoints.
    """

    def __init__(self, board: Board) -> None:
        self.board = board
        self.known: set[tuple[int, int]] = set()
        """Ranks and lives that have been answered."""

    def waits(self) -> bool:
        """Whether a restarted worker may be waiting."""
        return bool(self.board.check([COMES])) and self._asking() not in self.known

    def let_in(self, strategy: TakesBack, asked: int) -> None:
        """Let in the worker that waits, if there is one: it takes part from the stop that this worker has asked for."""
        if not self.waits():
            return
        rank, life = self._asking()
        self.known.add((rank, life))
        if (told := strategy.admit(rank, life)) is not None:
            self.board.set(LET_IN.format(rank, life), " ".join(map(str, (asked, *told))))
            print(f"worker {rank} has come back and takes part from the next checkpoint on", flush=True)

    def _asking(self) -> tuple[int, int]:
        rank, life = self.board.get(COMES).decode().split()
        return int(rank), int(life)


def let_in(
    seat: Seat, sleep: Callable[[float], None] = time.sleep, now: Callable[[], float] = time.monotonic
) -> tuple[int, int, int]:
    """In a restarted worker: wait until another one lets it in.
    Returns the numbers of the last note that asks for a checkpoint, of the last meeting and of the last stop.

    Raises:
        TooLate: the run has ended before, or who let it in, or all others, are lost.
    """
    board, told = seat.store.under("checkpoint"), now() - TELL_S
    others = [rank for rank in range(seat.size) if rank != seat.rank]
    key = LET_IN.format(seat.rank, seat.life)
    print("is there again, and waits to be let in", flush=True)
    while not board.check([key]):
        if any(seat.store.check([f"done/worker/{rank}"]) for rank in others):
            raise TooLate("it has come back, and the run was over before it could take part")
        if all(is_lost(seat.store, rank) for rank in others) or _is_forgotten(seat, board, key):
            raise TooLate(NOBODY)
        if now() - told >= TELL_S:
            told = now()
            board.set(COMES, f"{seat.rank} {seat.life}")
        sleep(LOOK_S)
    asked, meeting, stop = board.get(key).split()
    return int(asked), int(meeting), int(stop)


def _is_forgotten(seat: Seat, board: Board, key: str) -> bool:
    """Whether the servers count this worker in, and the one that asked for it was lost before it could say so."""
    by = ADMITTED.format(seat.rank, seat.life)
    return bool(seat.store.check([by]) and is_lost(seat.store, int(seat.store.get(by))) and not board.check([key]))


def wait_for(
    written: Callable[[], bool], seat: Seat, name: str, writer: int, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Wait until a checkpoint that the other workers write is complete.

    Args:
        written: whether it is. name: its folder's. writer: rank of the worker that completes it.

    Raises:
        TooLate: they cannot.
    """
    board, key = seat.store.under("checkpoint"), NOT_WRITTEN.format(name)
    while not written():
        if board.check([key]):
            raise TooLate(f"it cannot come back without a checkpoint: {board.get(key).decode()}")
        if is_lost(seat.store, writer) and not written():
            raise TooLate(f"it cannot come back without a checkpoint: worker {writer}, which wrote it, was lost")
        sleep(LOOK_S)
