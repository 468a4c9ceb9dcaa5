"""A ledger of the work that a server has applied, line by line, for those who want to check it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from trainer.host.files import replace_file
from trainer.strategies.pserver.server.rules import Push
from trainer.strategies.pserver.server.server_assignment import ServersRun
from trainer.weights.server_files import parts_of

LEDGER = "ledger.{}.tsv"
HEADER = "worker\tpush\tepoch\tblock\tfirst\tafter_last\n"


class Ledger:
    """A ledger that is not kept: it gets each applied push with its leased work (N, 4), and writes nothing."""

    def __call__(self, push: Push, work: np.ndarray) -> None:
        """Note a push that was taken."""

    @property
    def place(self) -> Mapping[str, Any]:
        """The ledger's entry in a checkpoint: its length, and the CRC-32 of its content.

        Raises:
            OSError: it cannot be written.
        """
        return {"ledger": 0}


class LedgerFile(Ledger):
    """The ledger in a file: a line for each piece of leased work, or for the push where no work is leased.

    Every line is written at once, so that the file tells the truth also if the server is killed. What a full disk does
    not take is written once there is room.

    Args:
        place: what the checkpoint that the run goes on from says; what was applied afterwards is done again.
    """

    def __init__(self, path: Path, place: Mapping[str, Any]) -> None:
        text = _up_to(path, place) or HEADER
        replace_file(path, text)
        self._file, self._crc = path.open("ab", buffering=0), zlib.crc32(text.encode())
        self._due = b""

    def __call__(self, push: Push, work: np.ndarray) -> None:
        pieces = work.tolist() or [["", "", "", ""]]
        lines = ("\t".join(str(v) for v in (push.rank, push.sequence, *piece)) + "\n" for piece in pieces)
        text = "".join(lines).encode()
        self._crc = zlib.crc32(text, self._crc)
        waits, self._due = bool(self._due), self._due + text
        try:
            self._write()
        except OSError as error:  # the push has been applied
            if not waits:
                self._say(f"{self._file.name} cannot be written: {error.strerror}; its lines wait until it can")
        else:
            if waits:
                self._say(f"{self._file.name} has all its lines again")

    def _write(self) -> None:
        while self._due:
            self._due = self._due[self._file.write(self._due) :]

    def _say(self, what: str) -> None:
        with suppress(OSError):  # the log may be on that disk, too
            print(what, flush=True)

    @property
    def place(self) -> Mapping[str, Any]:
        self._write()
        return {"ledger": self._file.tell(), "ledger_crc": self._crc}


def opened_ledger(server: int, run: ServersRun) -> LedgerFile:
    """Open the ledger of a server that starts; of a run that goes on, the earlier ledger up to the checkpoint."""
    parts = parts_of(Path(run.resume)) if run.resume else []
    place = parts[server].meta if server < len(parts) else {}
    return LedgerFile(Path(run.plan.paths.run_dir) / LEDGER.format(server), place)


def _up_to(file: Path, place: Mapping[str, Any]) -> str:
    """The content of a ledger up to the place in a checkpoint; '' if it is another ledger. (Former versions saved the
    length alone.)"""
    stays = int(place.get("ledger", 0))
    begins = file.read_bytes()[:stays] if file.is_file() else b""
    same = len(begins) == stays and place.get("ledger_crc") in (None, zlib.crc32(begins))
    return begins.decode() if same else ""
