"""A server goes on from its part of a checkpoint, and what it has answered is known to its launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.notes import Notes
from tests.strategies.pserver.played import LIVES, Played
from trainer.checkpoint import durable_folder
from trainer.host import pulse
from trainer.strategies.pserver.protocol.messages import COMES, Verb, text
from trainer.weights.server_files import ServerFile


@pytest.fixture
def board() -> Notes:
    return Notes()


@pytest.fixture
def first(tmp_path: Path, board: Notes) -> Played:
    """A server that has started, with a snapshot after batch 0, and with batches 1 and 2 after it."""
    played = Played(tmp_path, board)
    played.starts()
    played.pushes(0, 1, 0, 1)
    played.asks(0, Verb.SAVE, text({"folder": "checkpoints/step-1", "checkpoint": True}))
    played.pushes(0, 2, 1, 3)
    assert played.values() == [1, 1, 1, 0, 0, 0]
    return played


def test_block_of_nobody_is_handed_over_after_the_lives_that_are_lost_as_the_notes_tell(
    first: Played, board: Notes
) -> None:
    board.set(f"lost/worker/1/{LIVES[1]}", "its process ended")
    first.asks(0, Verb.FENCE, text({"rank": -1, "life": 0, "epoch": 0, "block": 0}))
    assert first.pushes(1, 1, 3, 4).text()["fenced"], "what it had sent before comes too late"
    assert first.values() == [1, 1, 1, 0, 0, 0]


def test_kept_blocks_of_a_life_that_the_server_never_heard_of_go_to_others(first: Played, tmp_path: Path) -> None:
    """All have gone back, and worker 1 has died before its HELLO came here; its next life waits to be let in."""
    lease = text({"epoch": 0, "blocks": 2, "done": []})
    assert [first.asks(rank, Verb.LEASE, lease).mapping()["block"] for rank in (1, 0)] == [0, 1]
    first.asks(0, Verb.SAVE, text({"folder": "checkpoints/step-2", "checkpoint": True}))
    second = Played(tmp_path, Notes(), 2, str(durable_folder.partial_of(tmp_path / "checkpoints" / "step-2")))
    second.starts(ranks=[0])
    assert second.asks(1, Verb.HELLO, sequence=9, flags=COMES).verb == Verb.DONE
    answers = [second.asks(0, Verb.LEASE, lease).mapping() for _ in range(2)]
    assert [(answer["block"], answer["again"]) for answer in answers] == [(1, True), (0, True)]


class Killed(BaseException):
    """The process is gone: whatever would follow never is."""


def kill(*_: Any) -> None:
    raise Killed


@pytest.mark.parametrize("death", ["before the launcher can know", "before the answer", "after the answer"])
def test_what_a_worker_takes_for_done_the_launcher_counts_as_lost(first: Played, tmp_path: Path, death: str) -> None:
    path = pulse.make(tmp_path / "pulse")
    shown = pulse.Pulse(str(path))
    first.server.report_done = shown.update
    first.pushes(0, 3, 3, 4)
    if death == "before the launcher can know":
        first.server.report_done = kill
    elif death == "before the answer":
        first.answer = kill  # type: ignore[method-assign]
    else:
        first.answered = kill  # type: ignore[method-assign]
    answered = len(first.answers)
    with pytest.raises(Killed):
        first.pushes(0, 4, 4, 5)
    acknowledged = 3 + len(first.answers) - answered
    part = durable_folder.partial_of(tmp_path / "checkpoints" / "step-1") / "server-0.safetensors"
    assert ServerFile(0, part).version == 1
    assert acknowledged <= pulse.read(path).update <= 4, "of these the snapshot has one, and the others are told"
    assert acknowledged == (4 if death == "after the answer" else 3)
