"""The folder in which the processes of one life of a run write a checkpoint.

A host that is suspended while it writes may wake in the next life, in which others write the checkpoint of the same update. It
writes into a folder of the life before, which nobody completes.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from trainer.host.notes_board import Board

NOTE = "life"


def name_life(board: Board) -> None:
    """The first worker names this life of the run."""
    board.set(NOTE, secrets.token_hex(4))


def of_life(place: Path, board: Board) -> Path:
    """The folder for a checkpoint to come, which becomes ``place``; the same for all processes of this life."""
    return place.with_name(f"{place.name}.{board.get(NOTE).decode()}") if board.check([NOTE]) else place


def place_of(folder: Path) -> Path:
    """What a folder of :func:`of_life` becomes."""
    return folder.with_name(folder.name.partition(".")[0])
