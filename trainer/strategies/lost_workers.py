"""Notes about lost workers, and the protocols of strategies that go on without a worker and take it back later."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from trainer.host.notes_board import Board, NoNote, OwnBoard

ADMITTED = "admitted/worker/{}/{}"
"""Note of a server that a life of a worker takes part; it holds the rank of the worker that admitted it."""

SILENT = "silent/worker/{}/{}"
"""Note of a server that a life of a worker is silent, with the reason; its launcher must end it before others do its
work. Empty: the server has heard the worker again."""

ASK_S = 5.0
"""Longest wait of a worker for a note about itself."""


def new_life() -> int:
    """Draw the random number of a process's life, which tells a restarted worker from the lost one."""
    return secrets.randbits(62) | 1


def note_of(board: Board, key: str) -> str:
    """The text of a note; empty: there is none, or it was withdrawn."""
    return board.get(key).decode() if board.check([key]) else ""


def is_lost(board: Board, rank: int) -> bool:
    """Whether a worker was lost, and no restarted one has been admitted in its place."""
    return bool(note_of(board, f"fenced/worker/{rank}"))


def was_lost(board: OwnBoard, rank: int) -> bool:
    """In the worker of that rank: whether the others count it as lost, because it was stopped for a while.

    False if the board does not answer within ``ASK_S``.
    """
    try:
        return is_lost(board.within(ASK_S), rank)
    except NoNote:
        return False


@runtime_checkable
class HaltsWhileWaiting(Protocol):
    """Protocol of a strategy with workers that have no common step, and that stop together for a checkpoint."""

    check_checkpoint: Callable[[bool], None] | None
    """Called repeatedly while this worker waits between two updates; it may call ``halt`` and ``save``. Its argument is
    whether this worker may ask the others to stop: not at a meeting of the training."""

    @property
    def meetings(self) -> int:
        """The number of collective calls of the training that this worker has begun."""

    def meet(self) -> None:
        """Wait for all other workers, and call ``check_checkpoint`` meanwhile."""


@runtime_checkable
class CountsSamples(Protocol):
    """Protocol of a strategy that counts the trained samples of all workers, dead ones included."""

    def samples_applied(self) -> int:
        """The samples of all applied gradients, over all workers and lives; called at the end, may wait."""


@runtime_checkable
class Readmits(Protocol):
    """Protocol of a strategy that survives the death of a worker, and admits the restarted one at a checkpoint."""

    def pause(self, seconds: float) -> None:
        """Sleep while this worker takes no part, and keep its connections alive."""

    def leads(self) -> bool:
        """Whether all workers of lower rank are lost."""

    def admit(self, rank: int, life: int) -> tuple[int, int] | None:
        """Admit a restarted worker at the next stop; returns the numbers for its ``come_back``, or None if it is lost
        again."""

    def come_back(self, numbers: tuple[int, int]) -> tuple[int, int] | None:
        """In a restarted worker: take part in that stop. Returns the number of the checkpoint and the rank that writes
        it, or None if all other workers are lost."""

    def take_part(self) -> None:
        """In a restarted worker, after it has loaded the checkpoint: begin to train."""
