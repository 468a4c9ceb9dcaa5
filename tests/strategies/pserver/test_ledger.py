"""The ledger of a server over its lives and those of the run."""

from __future__ import annotations

import errno
import os
import random
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.strategies.pserver.server.ledger import HEADER, LedgerFile
from trainer.strategies.pserver.server.rules import Push

NO_WORK = np.zeros((0, 4), dtype=np.int64)


def push(number: int, rank: int = 0) -> Push:
    return Push(rank=rank, sequence=number, samples=1.0, dense=None, rows={}, basis=0, clock=number, age=0)


def live(seed: int, folder: Path) -> None:
    """A run ends at any time, and goes on from one of its checkpoints."""
    draw, path = random.Random(seed), folder / "ledger.0.tsv"
    ledger, number = LedgerFile(path, {}), 0
    saved: list[tuple[Mapping[str, Any], str]] = []
    for _ in range(draw.randrange(5, 30)):
        match draw.choice(("push", "push", "save", "save", "run ends")):
            case "push":
                number += 1
                work = np.array([[0, number, 0, 1], [0, number, 1, 2]][: draw.randrange(3)]).reshape(-1, 4)
                ledger(push(number), work)
            case "save":
                saved.append((ledger.place, path.read_text()))
            case "run ends" if saved:
                place, text = draw.choice(saved[-2:])
                ledger = LedgerFile(path, place)
                assert path.read_text() == text, f"seed {seed}"
                saved = [(place, text)]


def test_a_run_that_goes_on_has_the_ledger_of_its_checkpoint(tmp_path: Path) -> None:
    for seed in range(300):
        (folder := tmp_path / str(seed)).mkdir()
        live(seed, folder)


def test_a_line_is_in_the_file_when_the_push_is_taken(tmp_path: Path) -> None:
    ledger = LedgerFile(path := tmp_path / "ledger.0.tsv", {})
    ledger(push(1, rank=3), NO_WORK)
    ledger(push(2, rank=3), np.array([[0, 7, 1, 2]]))
    assert path.read_text() == HEADER + "3\t1\t\t\t\t\n3\t2\t0\t7\t1\t2\n"


def test_a_checkpoint_of_a_former_version_says_the_length_alone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.0.tsv"
    path.write_text(HEADER + "0\t1\t\t\t\t\n0\t2\t\t\t\t\n")
    LedgerFile(path, {"ledger": len(HEADER) + 8})
    assert path.read_text() == HEADER + "0\t1\t\t\t\t\n"


def test_a_ledger_that_is_gone_begins_anew(tmp_path: Path) -> None:
    LedgerFile(path := tmp_path / "ledger.0.tsv", {"ledger": 100, "ledger_crc": 5})
    assert path.read_text() == HEADER


class SmallDisk:
    """A file on a disk that has so many bytes left."""

    def __init__(self, file: Any) -> None:
        self.file, self.name, self.left = file, file.name, 10**9

    def write(self, data: bytes) -> int:
        if not self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        wrote = int(self.file.write(data[: self.left]))
        self.left -= wrote
        return wrote

    def tell(self) -> int:
        return int(self.file.tell())


def test_what_a_full_disk_does_not_take_is_written_once_there_is_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = LedgerFile(path := tmp_path / "ledger.0.tsv", {})
    ledger._file = disk = SmallDisk(ledger._file)  # type: ignore[assignment]
    text = HEADER
    for number in range(1, 40):
        if number in (10, 20):
            disk.left = 3  # of a line
        if number in (15, 25):
            disk.left = 10**9
        ledger(push(number), NO_WORK)  # which has been applied, whatever the disk does
        text += f"0\t{number}\t\t\t\t\n"
        assert text.startswith(path.read_text())
        if disk.left:
            assert path.read_text() == text
            assert ledger.place == {"ledger": len(text), "ledger_crc": zlib.crc32(text.encode())}
        else:
            with pytest.raises(OSError, match="No space left"):
                _ = ledger.place
    said = capsys.readouterr().out
    assert said.count("its lines wait until it can") == said.count("has all its lines again") == 2
