"""The ledger of a server over its lives and those of the run."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainer.strategies.pserver.server.ledger import BEFORE, HEADER, LedgerFile
from trainer.strategies.pserver.server.rules import Push

NO_WORK = np.zeros((0, 4), dtype=np.int64)


def push(number: int, rank: int = 0) -> Push:
    return Push(rank, number, 1.0, None, {}, basis=0, clock=number, age=0)


def live(seed: int, folder: Path) -> None:
    """Servers are killed at any time, started again from an older checkpoint, and checkpoints of each life may be completed."""
    draw, path = random.Random(seed), folder / "ledger.0.tsv"
    ledger, number = LedgerFile(path, {}), 0
    saved: list[tuple[Mapping[str, Any], str]] = []
    for _ in range(draw.randrange(5, 30)):
        match draw.choice(("push", "push", "save", "save", "server dies", "run ends")):
            case "push":
                number += 1
                work = np.array([[0, number, 0, 1], [0, number, 1, 2]][: draw.randrange(3)]).reshape(-1, 4)
                ledger(push(number), work)
            case "save":
                saved.append((ledger.place, path.read_text()))
            case "server dies" if saved:
                place, text = draw.choice(saved[-2:])
                ledger = LedgerFile(path, place, returns=True)
                assert path.read_text() == text, f"seed {seed}"
            case "run ends" if saved:
                place, text = draw.choice(saved[-2:])
                ledger = LedgerFile(path, place)
                assert path.read_text() == text, f"seed {seed}"
                assert not Path(BEFORE.format(path, 0)).exists()
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
    LedgerFile(path := tmp_path / "ledger.0.tsv", {"ledger": 100, "ledger_crc": 5}, returns=True)
    assert path.read_text() == HEADER
