"""Parts of a checkpoint of workers on other hosts, which do not share the run's folder."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from trainer.checkpoint import durable_folder
from trainer.host.notes_board import SealedBoard
from trainer.worker import parts_of_hosts
from trainer.worker.parts_of_hosts import receive, send

NAME = "worker-1.safetensors"


class Board(SealedBoard):
    """In a store of one process, which cannot be cloned."""

    def __init__(self, store: dist.Store, prefix: str = "board/") -> None:
        super().__init__(store, b"secret", prefix)

    def clone(self) -> Board:
        return Board(self.store, self.prefix)

    def under(self, prefix: str) -> Board:
        return Board(self.store, f"{self.prefix}{prefix}/")


@pytest.fixture
def board() -> Board:
    return Board(dist.HashStore())


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """The folder of another host, which has written its part."""
    folder = tmp_path / "there" / "step-000000010.life"
    durable_folder.write(folder, NAME, lambda path: path.write_bytes(bytes(range(256)) * 40))
    return folder


def sending(board: Board, folder: Path, failed: str = "", given_up: Callable[[], bool] = lambda: False) -> list[str]:
    """Send in a thread, as the writer of another host does; returns what :func:`send` returns, once it has."""
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(send(board, folder, NAME, failed, given_up)), daemon=True)
    thread.start()
    return said


def received(board: Board, tmp_path: Path, patience_s: float = 60.0, gone: bool = False) -> tuple[str, Path]:
    folder = tmp_path / "here" / "step-000000010.life"
    return receive(board, folder, NAME, patience_s, lambda name: gone), folder


def test_a_part_comes_in_pieces_with_its_seal_and_leaves_nothing_there(
    board: Board, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_of_hosts, "PIECE", 1000)
    content = (durable_folder.partial_of(there) / NAME).read_bytes()
    said = sending(board, there)
    failed, here = received(board, tmp_path)
    assert (failed, said) == ("", [""])
    assert durable_folder.is_written(here, NAME)
    assert (durable_folder.partial_of(here) / NAME).read_bytes() == content
    assert durable_folder.seals(here, [NAME])[NAME] == durable_folder.fingerprint(
        durable_folder.partial_of(here) / NAME
    )
    assert not durable_folder.partial_of(there).exists()
    notes = board.under(f"parts/{there.name}/{NAME}")
    assert [notes.get(str(number)) for number in range(11)] == [b""] * 11, "the store keeps no pieces"


def test_other_parts_of_that_host_stay_until_they_are_sent(board: Board, there: Path) -> None:
    durable_folder.write(there, "worker-2.safetensors", lambda path: path.write_text("x"))
    assert send(board, there, NAME, "", lambda: False) == ""
    assert durable_folder.is_written(there, "worker-2.safetensors")


def test_a_part_that_was_not_written_or_whose_worker_is_lost_is_not_waited_for(
    board: Board, there: Path, tmp_path: Path
) -> None:
    assert received(board, tmp_path, gone=True)[0] == f"{NAME} was not written: its worker was lost"
    assert received(board, tmp_path, patience_s=0.1)[0] == f"{NAME} did not come within 0.1 s"
    assert send(board, there, NAME, "the disk is full", lambda: False) == "the disk is full"
    assert received(board, tmp_path)[0] == "the disk is full"


def test_a_checkpoint_that_is_given_up_holds_no_sender(
    board: Board, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_of_hosts, "PIECE", 1000)
    assert send(board, there, NAME, "", lambda: True) == ""
    assert not durable_folder.partial_of(there).exists()


def test_a_damaged_part_is_refused(board: Board, there: Path, tmp_path: Path) -> None:
    path = durable_folder.partial_of(there) / NAME
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    sending(board, there)
    failed, here = received(board, tmp_path)
    assert failed == f"{NAME} has come damaged from its host" and not durable_folder.is_written(here, NAME)
