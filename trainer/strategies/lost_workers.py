"""What strategies that go on without a lost worker can do: stop all workers together, take a restarted one back, and
count its samples."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from trainer.host.notes_board import Board, NoNote, OwnBoard

ADMITTED = "admitted/worker/{}/{}"
"""Note of a server: who had that life of a worker let in."""

SILENT = "silent/worker/{}/{}"
"""Note of a server: that life of a worker shows no sign of life, and why its launcher is to end it before others do its
work; empty: it was heard again."""

ASK_S = 5.0
"""So long a worker waits for what the board says of itself."""


def new_life() -> int:
    """Draw the random number by which a restarted worker is told from the lost one whose place it takes."""
    return secrets.randbits(62) | 1


def note_of(board: Board, key: str) -> str:
    """What a note says; empty: there is none, or it was taken back."""
    return board.get(key).decode() if board.check([key]) else ""


def is_lost(board: Board, rank: int) -> bool:
    """Whether a worker was lost, and no restarted one has been let in for it."""
    return bool(note_of(board, f"fenced/worker/{rank}"))


def was_lost(board: OwnBoard, rank: int) -> bool:
    """In the worker of that rank: whether it was stopped and taken for lost, so that another one does its work by now.
    A board that does not answer for a while counts as no."""
    try:
        return is_lost(board.within(ASK_S), rank)
    except NoNote:
        return False


@runtime_checkable
class LooksUp(Protocol):
    """Protocol of a strategy whose workers have no common step and must be stopped together now and then."""

    check_checkpoint: Callable[[bool], None] | None
    """Called now and then while this worker waits between two updates; it may call ``halt`` and ``save``. It is told
    whether this worker may be the one to stop the others: at a meeting of the training it may not."""

    @property
    def meetings(self) -> int:
        """How many collective calls of the training this worker has made, the one that it waits in included."""

    def meet(self) -> None:
        """Wait for all other workers, calling ``look`` meanwhile."""


@runtime_checkable
class CountsSamples(Protocol):
    """Protocol of a strategy that knows how many samples are trained, also those of workers that have died since."""

    def samples_applied(self) -> int:
        """The training samples of all workers and lives whose gradients are applied; called at the end, and may
        wait."""


@runtime_checkable
class TakesBack(Protocol):
    """Protocol of a strategy that survives a worker's death and takes the restarted one back at a checkpoint."""

    def pause(self, seconds: float) -> None:
        """Sleep, looking after what this worker needs while it takes no part."""

    def leads(self) -> bool:
        """Whether this worker is the first of those not known to be lost."""

    def admit(self, rank: int, life: int) -> tuple[int, int] | None:
        """Let a restarted worker in at the coming stop; returns what it must know, or None if it is lost again."""

    def come_back(self, numbers: tuple[int, int]) -> tuple[int, int] | None:
        """In a restarted worker: take part in that stop.
        Returns the number of the others' checkpoint and the rank that writes it, or None if all others are lost."""

    def take_part(self) -> None:
        """In a restarted worker that has loaded the checkpoint: begin to train."""
