"""Brings workers' parts of a checkpoint to host 0 by the run's board, where hosts do not share the run's folder.

Notes of one part, below ``STEP.LIFE/NAME``::

    failed    why its worker could not write it
    seal      its size and checksum
    0, 1, ..  its pieces, each emptied once it is read: the store keeps all notes in memory
    have/0    piece 0 is read, and piece 1 may come
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainer.checkpoint import durable_folder
from trainer.errors import RunFailed
from trainer.host.notes_board import NoNote, OwnBoard

PIECE = 4 << 20
"""Bytes of a file in one note."""
POLL_S = 0.02
NOTES = "parts"


def send(board: OwnBoard, folder: Path, name: str, failed: str, is_given_up: Callable[[], bool]) -> str:
    """Send a part that this host has written to the worker that completes the checkpoint; the file is then removed.

    Args:
        failed: why it is not written; empty: it is.
        is_given_up: whether nobody will read it.

    Returns:
        Empty, or why it could not be sent.
    """
    notes, path = _notes(board, folder, name), durable_folder.partial_of(folder) / name
    try:
        if failed:
            notes.set("failed", failed)
            return failed
        seal = durable_folder.seal_of(path).read_text()
        notes.set("seal", seal)
        with path.open("rb") as file:
            for number in range(_pieces(seal)):
                while number and not notes.check([f"have/{number - 1}"]):
                    if is_given_up():
                        return ""
                    time.sleep(POLL_S)
                notes.set(str(number), base64.b64encode(file.read(PIECE)).decode())
    except (NoNote, OSError) as error:
        return f"{name} cannot be sent to host 0: {error}"
    finally:
        for file_of_part in (path, durable_folder.seal_of(path)):
            file_of_part.unlink(missing_ok=True)
        with suppress(OSError):  # other workers' parts are there
            path.parent.rmdir()
    return ""


def receive(board: OwnBoard, folder: Path, name: str, patience_s: float, is_gone: Callable[[str], bool]) -> str:
    """Write a part of another host's worker, with its seal; returns '' or why it does not come.

    Args:
        patience_s: longest wait for the next piece.
        is_gone: whether the worker that writes the part of that name is lost.
    """
    notes, path = _notes(board, folder, name), durable_folder.partial_of(folder) / name

    def note(key: str) -> str:
        until = time.monotonic() + patience_s
        while not notes.check([key]):
            if notes.check(["failed"]):
                raise RunFailed(notes.get("failed").decode())
            if is_gone(name):
                raise RunFailed(f"{name} was not written: its worker was lost")
            if time.monotonic() > until:
                raise RunFailed(f"{name} did not come within {patience_s:g} s")
            time.sleep(POLL_S)
        return notes.get(key).decode()

    def fetch(temporary: Path) -> None:
        with temporary.open("wb") as file:
            for number in range(_pieces(seal)):
                file.write(base64.b64decode(note(str(number))))
                notes.set(str(number), "")
                notes.set(f"have/{number}", "")
        if durable_folder.fingerprint(temporary) != json.loads(seal):
            raise RunFailed(f"{name} has come damaged from its host")

    try:
        seal = note("seal")
        durable_folder.make_folder(path.parent)
        durable_folder.durable(path, fetch)
        durable_folder.durable_text(durable_folder.seal_of(path), seal)
    except (RunFailed, NoNote, OSError, ValueError) as error:
        return str(error)
    return ""


def _notes(board: OwnBoard, folder: Path, name: str) -> OwnBoard:
    return board.clone().under(f"{NOTES}/{folder.name}/{name}")


def _pieces(seal: str) -> int:
    return -(-int(json.loads(seal).get("bytes", 0)) // PIECE)
