"""A ledger of the work that a server has applied, line by line, for those who want to check it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from trainer.strategies.pserver.server.rules import Push
from trainer.strategies.pserver.server.server_assignment import ServersRun
from trainer.weights.server_files import parts_of

LEDGER = "ledger.{}.tsv"
HEADER = "worker\tpush\tepoch\tblock\tfirst\tafter_last\n"


class Ledger:
    """The ledger that is not kept: it is told of each push that was taken and of its leased work (N, 4), and writes
    nothing."""

    def __call__(self, push: Push, work: np.ndarray) -> None:
        """Note a push that was taken."""

    @property
    def bytes(self) -> int:
        """The length of the ledger's file so far."""
        return 0


class LedgerFile(Ledger):
    """The ledger in a file: a line for each piece of leased work, or for the push where no work is leased.

    Every line is written at once, so that the file tells the truth also if the server is killed.

    Args:
        stays: bytes of the file that a run before has left; what it did afterwards is done again.
    """

    def __init__(self, path: Path, stays: int = 0) -> None:
        goes_on = 0 < stays <= (path.stat().st_size if path.is_file() else 0)
        if goes_on:
            os.truncate(path, stays)
        self._file = path.open("a" if goes_on else "w", buffering=1, encoding="utf-8")
        if not goes_on:
            self._file.write(HEADER)

    def __call__(self, push: Push, work: np.ndarray) -> None:
        pieces = work.tolist() or [["", "", "", ""]]
        lines = ("\t".join(str(v) for v in (push.rank, push.sequence, *piece)) + "\n" for piece in pieces)
        self._file.write("".join(lines))

    @property
    def bytes(self) -> int:
        return self._file.tell()


def opened_ledger(server: int, run: ServersRun) -> LedgerFile:
    """When a server starts: open its ledger; where a run goes on, that of the run before up to the checkpoint."""
    parts = parts_of(Path(run.resume)) if run.resume else []
    stays = int(parts[server].meta.get("ledger", 0)) if server < len(parts) else 0
    return LedgerFile(Path(run.plan.run_dir) / LEDGER.format(server), stays)
