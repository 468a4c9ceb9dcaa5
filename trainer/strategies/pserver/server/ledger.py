"""Which work a server has applied, line by line, for those who want to check it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from trainer.strategies.pserver.server.rules import Push

Ledger = Callable[[Push, np.ndarray], None]
"""Told of each push that was taken, and of its leased work (N, 4)."""
HEADER = "worker\tpush\tepoch\tblock\tfirst\tafter_last\n"


def nobody(push: Push, work: np.ndarray) -> None:
    """No ledger is kept."""


def ledger_file(path: Path) -> Ledger:
    """A ledger that appends to a file: a line for each piece of leased work, or for the push where no work is leased.

    Every line is written at once, so that the file tells the truth also if the server is killed.
    """
    file = path.open("w", buffering=1, encoding="utf-8")
    file.write(HEADER)

    def keep(push: Push, work: np.ndarray) -> None:
        pieces = work.tolist() or [["", "", "", ""]]
        file.write("".join("\t".join(str(v) for v in (push.rank, push.sequence, *piece)) + "\n" for piece in pieces))

    return keep
