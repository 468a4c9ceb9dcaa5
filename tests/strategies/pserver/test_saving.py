"""Nobody loses patience with a worker or a server that saves, and nobody waits for ever."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.notes import Notes
from tests.strategies.pserver.test_regained import OPTIONS, Played
from trainer.checkpoint import durable_folder
from trainer.errors import Missing, RunFailed
from trainer.host.notes_board import FolderLost
from trainer.strategies.pserver.protocol import snapshot, snapshot_parts
from trainer.strategies.pserver.protocol.messages import (
    APART,
    SAVE_S,
    SAVES,
    SAVING,
    STOPS,
    Kind,
    Message,
    Record,
    Verb,
    text,
    unpack,
)
from trainer.strategies.pserver.server.part_writer import Forked
from trainer.strategies.pserver.worker.client import Client
from trainer.strategies.pserver.worker.export import save_parts

TIMEOUT_S = float(OPTIONS["timeout_s"])  # type: ignore[arg-type]


@pytest.mark.parametrize("flags", [SAVES, STOPS | SAVES])
@pytest.mark.parametrize(("late_s", "comes"), [(TIMEOUT_S + 1, True), (SAVE_S, True), (SAVE_S + TIMEOUT_S + 1, False)])
def test_who_comes_late_because_servers_save_is_waited_for(tmp_path: Path, flags: int, late_s: float, comes: bool) -> None:  # fmt: skip
    play, zero = Played(tmp_path, Notes()), Record(Kind.NUMBERS, np.zeros(1))
    play.starts()
    waits = play.sends(1, Verb.MEET, zero, clock=1, flags=flags)
    _passes(play, late_s)
    if comes:
        assert waits not in play.answers
        play.sends(0, Verb.MEET, zero, clock=1, flags=flags)
        assert play.answers[waits].verb == Verb.DONE
    else:
        assert play.answers[waits].text()["why"].startswith("worker 0 did not arrive at a sum over the workers within")


def test_who_comes_late_at_another_meeting_is_named_after_the_timeout(tmp_path: Path) -> None:
    play = Played(tmp_path, Notes())
    play.starts()
    waits = play.sends(1, Verb.MEET, Record(Kind.NUMBERS, np.zeros(1)), clock=1, flags=STOPS)
    _passes(play, TIMEOUT_S + 1)
    assert "worker 0 did not arrive" in play.answers[waits].text()["why"]


@pytest.mark.parametrize("full", [False, True])
def test_server_says_that_it_writes_as_long_as_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    board, said = Notes(), list[bytes]()
    play, note, write = Played(tmp_path, board), SAVING.format(0), snapshot.write_part
    play.starts()

    def writes(*told: Any) -> None:
        said.append(board.get(note))
        if full:
            raise OSError(28, "No space left on device")
        write(*told)

    monkeypatch.setattr(snapshot, "write_part", writes)
    monkeypatch.setattr(play, "refuse", lambda why: None)
    answer = play.asks(0, Verb.SAVE, text({"folder": "checkpoints/1"}))
    assert answer.verb == (Verb.FAILED if full else Verb.DONE)
    assert said == [b"now"] and board.get(note) == b""


def test_note_that_cannot_be_written_costs_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    board = Notes()
    play, write = Played(tmp_path, board), board.set
    play.starts()

    def full(key: str, value: str) -> None:
        if key == SAVING.format(0):
            raise FolderLost("the launcher's folder cannot be written")
        write(key, value)

    monkeypatch.setattr(board, "set", full)
    assert play.asks(0, Verb.SAVE, text({"folder": "checkpoints/1"})).verb == Verb.DONE
    assert "no note tells that this server saves: the launcher's folder" in capsys.readouterr().out


def test_note_of_a_life_that_died_as_it_wrote_does_not_stay(tmp_path: Path) -> None:
    board = Notes()
    board.set(SAVING.format(0), "now")
    Played(tmp_path, board)
    assert board.get(SAVING.format(0)) == b""


class Ways:
    """Connections to one server that writes for so long, and answers nothing meanwhile or later."""

    count, look_s = 1, 1.0

    def __init__(self, writes_s: float, far: bool = False, there_s: float = 0.0) -> None:
        self.writes_s, self.time, self.far, self.there_s = writes_s, 0.0, far, there_s
        self.sent: list[tuple[float, Verb]] = []
        self.answers = [Message(Verb.DONE, number=1, incarnation=1, records=[Record(Kind.NUMBERS, np.array([1e9, 0.0]))])]  # fmt: skip

    def now(self) -> float:
        return self.time

    def some_save(self, servers: object) -> bool:
        return self.time < self.writes_s

    def wait(self, seconds: float) -> None:
        self.time += max(seconds, 0.001)

    def receive(self) -> list[Message]:
        came, self.answers = self.answers, []
        return came

    def started_again(self) -> dict[int, int]:
        return {}

    def send(self, server: int, frames: Any) -> None:
        message = unpack([bytearray(frame) for frame in frames])
        self.sent.append((self.time, message.verb))
        if message.verb == Verb.STATS and self.time < self.there_s:
            self.answers.append(Message(Verb.DONE, number=message.number))

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("writes_s", "least_s", "most_s"),
    [(0.0, 100.0, 110.0), (250.0, 250.0, 400.0), (1e9, SAVE_S, SAVE_S + 250.0)],
)
def test_worker_waits_while_a_server_writes_and_no_longer(writes_s: float, least_s: float, most_s: float) -> None:
    ways = Ways(writes_s)
    client = Client(0, ways, TIMEOUT_S)  # type: ignore[arg-type]
    with pytest.raises(Missing, match="server 0 did not answer PULL of worker 0") as told:
        client.wait([client.ask(0, Message(Verb.PULL))])
    assert told.value.who == ("server 0",)
    assert least_s <= ways.time <= most_s


@pytest.mark.parametrize(
    ("far", "there_s", "writes_s", "least_s", "most_s"),
    [
        (True, 0.0, 0.0, 100.0, 125.0),
        (True, 1000.0, 0.0, 1050.0, 1150.0),
        (True, 0.0, 1000.0, 1000.0, 1150.0),
        (True, 1e9, 0.0, SAVE_S + 100.0, SAVE_S + 125.0),
        (False, 0.0, 0.0, SAVE_S + 100.0, SAVE_S + 125.0),
    ],
)
def test_who_waits_for_a_checkpoint_misses_a_server_on_another_host_that_is_gone(
    far: bool, there_s: float, writes_s: float, least_s: float, most_s: float
) -> None:
    """Of a host without power nobody tells. On one host the launcher tells of a server that has ended, and none is asked."""
    ways = Ways(writes_s, far, there_s)
    client = Client(0, ways, TIMEOUT_S)  # type: ignore[arg-type]
    with pytest.raises(Missing, match=r"server 0 (has said nothing|did not answer MEET)") as told:
        client.meet(Message(Verb.MEET, flags=STOPS | SAVES), lambda answer: None, None)
    assert told.value.who == ("server 0",)
    assert least_s <= ways.time <= most_s
    asked = [time for time, verb in ways.sent if verb == Verb.STATS]
    assert bool(asked) == far and len(asked) < 12 + ways.time / 10


def test_parts_that_do_not_come_within_an_hour_are_not_fetched_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece takes a minute: the others, who wait for the first worker, must not lose patience first."""
    ways, asked = SimpleNamespace(time=0.0), list[Verb]()

    def wait(requests: list[Message], patience_s: float | None = None) -> list[Message]:
        ways.time += 60.0
        records = [text({"bytes": 1 << 40, "blake2b": ""}), Record(Kind.DENSE, np.zeros(1, dtype=np.uint8))]
        return [Message(Verb.DONE, flags=APART, records=records) for _ in requests]

    def ask(server: int, message: Message) -> Message:
        asked.append(message.verb)
        return message

    monkeypatch.setattr(snapshot_parts, "PIECE", 1)
    client = SimpleNamespace(connections=SimpleNamespace(now=lambda: ways.time), servers=range(1), names=["server 0"], ask=ask, wait=wait)  # fmt: skip
    with pytest.raises(RunFailed, match=f"the part of server 0 was not here within {SAVE_S:g} s"):
        save_parts(client, tmp_path / "checkpoints" / "step-1", checkpoint=True)  # type: ignore[arg-type]
    assert asked == [Verb.SAVE, *[Verb.FETCH] * 60]


def _passes(play: Played, seconds: float) -> None:
    """So much time passes, in which both workers are heard and the server looks around."""
    until = play.now + seconds
    while play.now < until:
        play.now = min(until, play.now + 5.0)
        play.server.ended_turn = play.now  # it has had turns
        with suppress(RunFailed):
            play.server.turn([(b"", Message(Verb.BEAT, rank)) for rank in (0, 1)])


@pytest.mark.parametrize("case", ["another host", "background=false", "for one who comes back"])
def test_a_server_writes_before_it_answers_where_nobody_writes_behind(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forked, "begin", lambda *arguments: pytest.fail("a copy writes it"))
    play = Played(tmp_path, Notes(), writer=None if case == "background=false" else Forked(lambda: 0.0))
    play.starts()
    asked = {"folder": "checkpoints/step-1", "checkpoint": True, "behind": case != "for one who comes back"}
    if case == "another host":
        asked["mark"] = "shared.7.tmp"  # a file that is not here
    assert play.asks(0, Verb.SAVE, text(asked)).verb == Verb.DONE
    assert durable_folder.is_written(tmp_path / "checkpoints" / "step-1", "server-0.safetensors")
