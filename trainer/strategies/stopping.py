"""What strategies can do whose workers have no common step: stop together, and take a worker back that was lost."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from trainer.host.notes_board import Board

ADMITTED = "admitted/worker/{}/{}"
"""Note of a server: who had that life of a worker let in."""


def new_life() -> int:
    """Draw the random number of a worker's new life."""
    return secrets.randbits(62) | 1


def is_lost(board: Board, rank: int) -> bool:
    """Whether a worker was lost, and none has been let in that came back for it."""
    key = f"fenced/worker/{rank}"
    return bool(board.check([key]) and board.get(key))


@runtime_checkable
class LooksUp(Protocol):
    """Has workers without a common step, which are stopped together now and then."""

    look: Callable[[bool], None] | None
    """Called now and then while this worker waits between two updates; it may call ``halt`` and ``save``. It is told
    whether this worker may be the one to stop the others: at a meeting of the training it may not."""

    @property
    def meetings(self) -> int:
        """At how many meetings of the training this worker was, that at which it waits now among them."""

    def meet(self) -> None:
        """Wait for all others, and look up meanwhile."""


@runtime_checkable
class TakesBack(Protocol):
    """Goes on when a worker dies, and takes one that was started again back when all stand still for a checkpoint."""

    def pause(self, seconds: float) -> None:
        """Sleep, and look after what this worker needs while it takes no part."""

    def leads(self) -> bool:
        """Whether this worker is the first of those that are left, as far as is known."""

    def admit(self, rank: int, life: int) -> tuple[int, int] | None:
        """Let a worker in that has come back, for the stop that follows; returns what it must know, or None: it is lost again."""

    def come_back(self, told: tuple[int, int]) -> tuple[int, int] | None:
        """In that worker: take part in that stop; returns the number of the others' checkpoint, and the rank that writes it,
        or None: all others are lost."""

    def take_part(self) -> None:
        """In that worker, when it is what the first worker was at the checkpoint: begin to train."""
