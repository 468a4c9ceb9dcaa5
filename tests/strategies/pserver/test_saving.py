"""Nobody loses patience with a worker or a server that saves, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.notes import Notes
from tests.strategies.pserver.played import OPTIONS, Played
from trainer.checkpoint import durable_folder, writer
from trainer.errors import Missing, RunFailed
from trainer.host.notes_board import FolderLost
from trainer.strategies.pserver.protocol import snapshot, snapshot_parts
from trainer.strategies.pserver.protocol.messages import (
    APART,
    SAVE_S,
    SAVE_TURN_S,
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
from trainer.strategies.pserver.server.answers import failed
from trainer.strategies.pserver.server.part_writer import Forked
from trainer.strategies.pserver.worker.client import Client
from trainer.strategies.pserver.worker.export import save_checkpoint, save_parts
from trainer.strategies.pserver.worker.requests import Fenced
from trainer.weights.server_files import part_name

TIMEOUT_S = float(OPTIONS["timeout_s"])  # type: ignore[arg-type]


@pytest.mark.parametrize("flags", [SAVES, STOPS | SAVES])
@pytest.mark.parametrize(("late_s", "comes"), [(TIMEOUT_S + 1, True), (SAVE_S, True), (SAVE_S + TIMEOUT_S + 1, False)])
def test_who_comes_late_because_servers_save_is_waited_for(
    tmp_path: Path, flags: int, late_s: float, comes: bool
) -> None:
    play, zero = Played(tmp_path, Notes()), Record(Kind.NUMBERS, np.zeros(1))
    play.starts()
    waits = play.sends(1, Verb.MEET, zero, clock=1, flags=flags)
    _passes(play, late_s)
    if comes:
        assert waits not in play.answers
        play.sends(0, Verb.MEET, zero, clock=1, flags=flags)
        assert play.answers[waits].verb == Verb.DONE
    else:
        limit = f"within {TIMEOUT_S + SAVE_S:g} s (strategy.timeout_s and an hour for a checkpoint)"
        assert play.answers[waits].text()["why"] == f"worker 0 did not arrive at a sum over the workers {limit}"


def test_who_comes_late_at_another_meeting_is_named_after_the_timeout(tmp_path: Path) -> None:
    play = Played(tmp_path, Notes())
    play.starts()
    waits = play.sends(1, Verb.MEET, Record(Kind.NUMBERS, np.zeros(1)), clock=1, flags=STOPS)
    _passes(play, TIMEOUT_S + 1)
    assert play.answers[waits].text()["why"].endswith(f"within {TIMEOUT_S:g} s (strategy.timeout_s)")


def test_a_save_that_waits_for_its_turn_is_answered_before_its_worker_gives_it_up(tmp_path: Path) -> None:
    writes: Any = SimpleNamespace(busy=lambda: True)
    play = Played(tmp_path, Notes(), writer=writes)
    play.starts()
    waits = play.sends(0, Verb.SAVE, text({"folder": "checkpoints/step-1", "checkpoint": True, "behind": True}))
    _passes(play, SAVE_TURN_S - 1)
    assert waits not in play.answers
    _passes(play, 10.0)
    assert play.now < SAVE_S - 500
    why = play.answers[waits].text()["why"]
    assert why == f"server 0 did not arrive at the end of its write of the part before within {SAVE_TURN_S:g} s"


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


class Ways:
    """Connections to one server that writes for so long, and answers nothing meanwhile or later."""

    count = 1

    def __init__(self, writes_s: float, far: bool = False, there_s: float = 0.0) -> None:
        self.writes_s, self.time, self.far, self.there_s = writes_s, 0.0, far, there_s
        self.sent: list[tuple[float, Verb]] = []
        self.answers = [
            Message(Verb.DONE, number=1, incarnation=1, records=[Record(Kind.NUMBERS, np.array([1e9, 0.0]))])
        ]

    def now(self) -> float:
        return self.time

    def saving(self, servers: Iterable[int]) -> set[int]:
        return set(servers) if self.time < self.writes_s else set()

    def wait(self, seconds: float) -> None:
        self.time += max(seconds, 0.001)

    def receive(self) -> list[Message]:
        came, self.answers = self.answers, []
        return came

    def send(self, server: int, frames: Any) -> bool:
        message = unpack([bytearray(frame) for frame in frames])
        self.sent.append((self.time, message.verb))
        if message.verb == Verb.STATS and self.time < self.there_s:
            self.answers.append(Message(Verb.DONE, number=message.number))
        return True

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("writes_s", "least_s", "most_s"), [(0.0, 100.0, 110.0), (250.0, 250.0, 400.0), (1e9, SAVE_S, SAVE_S + 250.0)]
)
def test_worker_waits_while_a_server_writes_and_no_longer(writes_s: float, least_s: float, most_s: float) -> None:
    ways = Ways(writes_s)
    client = Client(0, ways, TIMEOUT_S)  # type: ignore[arg-type]
    with pytest.raises(Missing, match="server 0 did not answer PULL of worker 0") as told:
        client.wait([client.ask(0, Message(Verb.PULL))])
    assert told.value.who == ("server 0",)
    assert least_s <= ways.time <= most_s


def test_a_server_that_is_gone_while_it_writes_is_waited_for_once_and_not_at_each_request() -> None:
    """Its note stays, because nobody takes it back. Once the server is heard, another write has its own time."""
    ways = Ways(1e9)
    client = Client(0, ways, TIMEOUT_S)  # type: ignore[arg-type]
    for most_s in (SAVE_S + 250.0, 150.0):
        began = ways.time
        with pytest.raises(Missing, match="server 0 did not answer PULL of worker 0"):
            client.wait([client.ask(0, Message(Verb.PULL))])
        assert ways.time - began <= most_s
    client.silent.heard(0)
    assert client.silent.write([0]) == {0}


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
    """Of a host without power nobody tells. On one host the launcher tells of a server that has ended, and none is
    asked."""
    ways = Ways(writes_s, far, there_s)
    client = Client(0, ways, TIMEOUT_S)  # type: ignore[arg-type]
    with pytest.raises(Missing, match=r"server 0 (said nothing to worker 0|did not answer MEET)") as told:
        client.meet(Message(Verb.MEET, flags=STOPS | SAVES), None)
    assert told.value.who == ("server 0",)
    assert least_s <= ways.time <= most_s
    asked = [time for time, verb in ways.sent if verb == Verb.STATS]
    assert bool(asked) == far and len(asked) < 12 + ways.time / 10


class Two(Ways):
    """Connections to two servers.

    Args:
        how: what a server answers to a request, and after how many seconds.
    """

    count = 2

    def __init__(self, how: Callable[[int, Verb], tuple[float, Message]]) -> None:
        super().__init__(0.0)
        self.how, self.coming = how, list[tuple[float, Message]]()

    def send(self, server: int, frames: Any) -> bool:
        message = unpack([bytearray(frame) for frame in frames])
        after_s, answer = 0.0, Message(Verb.DONE, incarnation=1, records=[Record(Kind.NUMBERS, np.array([1e9, 0.0]))])
        if message.verb != Verb.HELLO:
            after_s, answer = self.how(server, message.verb)
        answer.number = message.number
        self.coming.append((self.time + after_s, answer))
        return True

    def receive(self) -> list[Message]:
        due = [answer for at, answer in self.coming if at <= self.time]
        self.coming = [(at, answer) for at, answer in self.coming if at > self.time]
        return due


FULL = "OSError(28, 'No space left on device')"


@pytest.mark.parametrize(
    ("after_s", "told"), [((0.0, 0.0), FULL), ((0.0, 50.0), FULL), ((0.0, SAVE_S + 50.0), "did not answer SAVE")]
)
def test_a_checkpoint_that_two_servers_refuse_is_given_up_and_the_training_goes_on(
    after_s: tuple[float, float], told: str, tmp_path: Path
) -> None:
    def how(server: int, verb: Verb) -> tuple[float, Message]:
        return (after_s[server], failed(FULL)) if verb == Verb.SAVE else (100.0, Message(Verb.DONE))

    ways, folder = Two(how), tmp_path / "checkpoints" / "step-1"
    client = Client(0, ways, TIMEOUT_S)  # type: ignore[arg-type]
    durable_folder.partial_of(folder).mkdir(parents=True)
    save_checkpoint(client, folder, behind=True)
    assert not client.under_way and ways.time >= min(max(after_s), SAVE_S)
    for server in range(2):
        why = writer.failure_of(folder, part_name(server)).read_text()
        assert told in why and "strategy.timeout_s" not in why
    assert client.meet(Message(Verb.MEET, flags=STOPS | SAVES), None).verb == Verb.DONE
    assert ways.time >= max(after_s)


def test_who_was_declared_lost_does_not_wait_for_the_other_servers(tmp_path: Path) -> None:
    ways = Two(lambda server, verb: (1000.0 * server, failed("worker 0 was lost", fenced=True)))
    client = Client(0, ways, TIMEOUT_S)  # type: ignore[arg-type]
    with pytest.raises(Fenced):
        save_checkpoint(client, tmp_path / "checkpoints" / "step-1", behind=True)
    assert ways.time < 1


@pytest.mark.parametrize("first", [0, 1])
def test_a_failure_does_not_hide_the_answers_that_come_with_it(first: int) -> None:
    ways = Two(lambda server, verb: (0.0, Message(Verb.DONE) if server else failed("it is refused")))
    client = Client(0, ways, TIMEOUT_S)  # type: ignore[arg-type]
    requests = [client.ask(server, Message(Verb.PULL)) for server in (first, 1 - first)]
    with pytest.raises(RunFailed, match="it is refused"):
        client.take()
    assert not client.under_way and all(request.answer is not None for request in requests)
    with pytest.raises(RunFailed, match="it is refused"):
        client.wait(requests)


def test_a_worker_names_the_key_of_its_patience(tmp_path: Path) -> None:
    client = Client(0, Two(lambda server, verb: (1e9, Message(Verb.DONE))), TIMEOUT_S)  # type: ignore[arg-type]
    with pytest.raises(
        Missing,
        match=(
            rf"MEET of worker 0 within {TIMEOUT_S + SAVE_S + 5:g} s \(strategy.timeout_s and an hour for a "
            rf"checkpoint\)$"
        ),
    ):
        client.meet(Message(Verb.MEET, flags=STOPS | SAVES), None)
    with pytest.raises(Missing, match=rf"within {TIMEOUT_S + 5:g} s \(strategy.timeout_s and 5 s for the answer\)$"):
        client.wait([client.ask(1, Message(Verb.PULL))])


def test_parts_that_do_not_come_within_an_hour_are_not_fetched_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece takes a minute: the others, who wait for the first worker, must not lose patience first."""
    ways, asked = SimpleNamespace(time=0.0), list[Verb]()

    def settle(requests: list[Message], patience_s: float | None = None) -> list[Message]:
        ways.time += 60.0
        records = [text({"bytes": 1 << 40, "blake2b": ""}), Record(Kind.DENSE, np.zeros(1, dtype=np.uint8))]
        return [Message(Verb.DONE, flags=APART, records=records) for _ in requests]

    def ask(server: int, message: Message) -> Message:
        asked.append(message.verb)
        return message

    monkeypatch.setattr(snapshot_parts, "PIECE", 1)
    client = SimpleNamespace(
        connections=SimpleNamespace(now=lambda: ways.time), servers=range(1), names=["server 0"], ask=ask, settle=settle
    )
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


def test_a_part_for_another_host_that_nobody_fetched_goes_with_the_next_save(tmp_path: Path) -> None:
    """Who had it written is lost, and another worker has all saved in a folder of its own."""
    play = Played(tmp_path, Notes())
    play.starts()
    first, second = (tmp_path / "checkpoints" / f"persistables.by-{rank}" for rank in (0, 1))
    for rank, folder in enumerate((first, second)):
        play.asks(rank, Verb.SAVE, text({"folder": f"checkpoints/{folder.name}", "mark": "shared.7.tmp"}))
        assert durable_folder.is_written(folder, "server-0.safetensors")
    assert not durable_folder.partial_of(first).exists()
    play.asks(1, Verb.SAVE, text({"folder": f"checkpoints/{second.name}", "mark": "shared.7.tmp"}))
    assert durable_folder.is_written(second, "server-0.safetensors"), "the same once more"
