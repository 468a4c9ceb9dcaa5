"""Notes between processes of a run: what is there, and what a stranger makes of it."""

from __future__ import annotations

import datetime
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from trainer.host.notes_board import FolderBoard, NoNote, OwnBoard, SealedBoard

SOON = datetime.timedelta(seconds=0.05)
SECRET = secrets.token_bytes(32)


def in_folder(folder: Path) -> Callable[[], OwnBoard]:
    return lambda: FolderBoard(folder)


def sealed(folder: Path) -> Callable[[], OwnBoard]:
    store = dist.HashStore()
    return lambda: SealedBoard(store, SECRET)


@pytest.fixture(params=[in_folder, sealed])
def board(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], OwnBoard]:
    """Makes the board as each process does."""
    return request.param(tmp_path)  # type: ignore[no-any-return]


def test_note_is_read_by_others_and_replaced_by_the_next(board: Callable[[], OwnBoard]) -> None:
    ours, theirs = board(), board()
    assert not theirs.check(["a/b"])
    for text in ("one", "", "two words, ü\nand a line"):
        ours.set("a/b", text)
        assert theirs.check(["a/b"]) and theirs.get("a/b") == text.encode()
    assert not theirs.check(["a/b", "a"]) and not theirs.check(["b"])


def test_part_of_a_board_has_keys_of_its_own(board: Callable[[], OwnBoard]) -> None:
    board().under("calls").under("1").set("x", "yes")
    assert board().check(["calls/1/x"]) and not board().check(["x"])
    assert board().under("calls").get("1/x") == b"yes"


def test_wait_ends_when_all_notes_are_there_and_fails_when_they_are_not_in_time(board: Callable[[], OwnBoard]) -> None:
    with pytest.raises(RuntimeError):
        board().wait(["first"], SOON)
    got: list[bytes] = []

    def take() -> None:
        own = board()
        own.wait(["first", "second"])
        got.extend([own.get("first"), own.get("second")])

    waiting = threading.Thread(target=take)
    waiting.start()
    board().set("second", "2")
    board().set("first", "1")
    waiting.join(60)
    assert got == [b"1", b"2"]


def test_board_whose_folder_is_gone_says_so(tmp_path: Path) -> None:
    gone = FolderBoard(tmp_path / "gone")
    with pytest.raises(NoNote, match="is gone"):
        gone.wait(["key"])
    with pytest.raises(NoNote, match="cannot be written"):
        gone.set("key", "note")


FORGED = {
    "plain text": lambda key, raw, other: "tcp://stranger:1",
    "not text": lambda key, raw, other: "\udcff\udcfe",
    "seal of another secret": lambda key, raw, other: _of(other, key),
    "another text under a seal": lambda key, raw, other: raw.replace("tcp://", "udp://"),
    "another time under a seal": lambda key, raw, other: " ".join([raw.split(" ")[0], "9" * 19, raw.split(" ", 2)[2]]),
    "a note of another key": lambda key, raw, other: _of(SealedBoard(dist.HashStore(), SECRET), "another"),
}


def _of(board: SealedBoard, key: str) -> str:
    """How a board of that secret writes."""
    board.set(key, "tcp://stranger:1")
    return board.store.get(board.prefix + key).decode()  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", FORGED)
def test_note_of_a_stranger_is_not_there_and_is_told_once(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    store, key = dist.HashStore(), "endpoint/server/0"
    SealedBoard(store, SECRET).set(key, "tcp://server:1")
    raw = store.get(f"board/{key}").decode()
    forged = FORGED[how](key, raw, SealedBoard(dist.HashStore(), secrets.token_bytes(32)))
    seen, new = SealedBoard(store, SECRET), SealedBoard(store, SECRET)
    assert seen.get(key) == b"tcp://server:1"
    store.set(f"board/{key}", forged.encode("utf-8", "surrogateescape") if how == "not text" else forged)
    assert not new.check([key]) and new.forged(key)
    with pytest.raises(NoNote):
        new.wait([key], SOON)
    assert seen.get(key) == b"tcp://server:1", "what was seen counts on"
    assert capsys.readouterr().out.count(f"{key} in the launcher's store is not of this run and is ignored") == 2
    SealedBoard(store, SECRET).set(key, "tcp://server:2")
    assert new.get(key) == seen.get(key) == b"tcp://server:2"


def test_older_note_that_is_put_back_does_not_count() -> None:
    store = dist.HashStore()
    writer, reader = SealedBoard(store, SECRET), SealedBoard(store, SECRET)
    writer.set("load", "old")
    raw = store.get("board/load")
    writer.set("load", "new")
    assert reader.get("load") == b"new"
    store.set("board/load", raw.decode())
    assert reader.get("load") == b"new"
    store.delete_key("board/load")
    assert reader.check(["load"]) and reader.get("load") == b"new"


def test_note_counts_though_the_clock_of_its_writer_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = dist.HashStore(), [10**18]
    monkeypatch.setattr(time, "time_ns", lambda: now[0])
    writer, reader = SealedBoard(store, SECRET), SealedBoard(store, SECRET)
    for number in range(3):
        writer.set("beat", f"{number}")
        assert reader.get("beat") == f"{number}".encode()
        now[0] -= 20 * 10**9
    again = SealedBoard(store, SECRET)  # of a process that was started again
    again.set("beat", "again")
    assert reader.get("beat") == writer.get("beat") == b"again"
    writer.clone().set("beat", "of a thread")
    assert reader.get("beat") == b"of a thread"
