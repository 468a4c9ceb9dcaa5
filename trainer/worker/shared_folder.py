"""Finds out whether the workers of several hosts see the same folder."""

from __future__ import annotations

import datetime
import secrets
from pathlib import Path

from trainer.host.notes_board import verdict
from trainer.strategies.seat import Seat

NOTES, NAME, MARK = "shared-folder", "name", ".shared-{}"


def is_shared(folder: Path, seat: Seat, patience_s: float) -> bool:
    """Whether all workers see a file that the first one leaves in a folder; collective if there are several hosts.

    Args:
        patience_s: longest wait for the others.
    """
    if seat.size == seat.local_size:
        return True
    board, limit = seat.store.under(NOTES), datetime.timedelta(seconds=patience_s)
    name = secrets.token_hex(8)
    mark = folder / MARK.format(name)
    if seat.rank == 0:
        mark.touch()
        board.set(NAME, name)
    board.wait([NAME], limit)
    there = (folder / MARK.format(board.get(NAME).decode())).is_file()
    seen = verdict(board, seat.rank, seat.size, str(int(there)), lambda notes: str(set(notes) == {b"1"}), limit)
    if seat.rank == 0:
        mark.unlink()
    return seen == str(True)


def life_of(seat: Seat) -> str:
    """A name of this life of a run on several hosts, known to all hosts that see the folder; call after
    :func:`is_shared`. Empty on one host: there all processes of a life have ended before the next life begins."""
    return "" if seat.size == seat.local_size else seat.store.under(NOTES).get(NAME).decode()
