"""Finds out whether the workers of several hosts see the same folder."""

from __future__ import annotations

import datetime
import secrets
from pathlib import Path

from trainer.strategies.contract import Seat


def is_shared(folder: Path, seat: Seat, patience_s: float) -> bool:
    """Whether all workers see a file that the first one leaves in a folder; collective if there are several hosts.

    Args:
        patience_s: longest wait for the others.
    """
    if seat.size == seat.local_size:
        return True
    board, limit = seat.store.under("shared-folder"), datetime.timedelta(seconds=patience_s)
    mark = folder / f".shared-{secrets.token_hex(8)}"
    if seat.rank == 0:
        mark.touch()
        board.set("name", mark.name)
    board.wait(["name"], limit)
    there = (folder / board.get("name").decode()).is_file()
    board.set(str(seat.rank), str(int(there)))
    everybody = [str(rank) for rank in range(seat.size)]
    board.wait(everybody, limit)
    if seat.rank == 0:
        mark.unlink()
    return all(board.get(rank) == b"1" for rank in everybody)
