"""Runs of other engines in ``ps``, ``cancel`` and ``logs``: the handle of the engine's job says and does it all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from trainer.cli import queue_verbs
from trainer.errors import UserError
from trainer.host.engine_tasks import ENGINE
from trainer.launch.engines.contract import ENDED, Handle, Job, Living, State, Submitter, Unreachable
from trainer.service import elsewhere
from trainer.service.queue import DONE, SUBMITTED, Queue


class FakeJob(Handle):
    """A job whose state is a file."""

    name, cancels, log = "Fake job 7", "fake cancel 7", "log"

    def __init__(self, folder: Path) -> None:
        self.file = folder / "state"

    def state(self) -> State:
        phase, reason, code = json.loads(self.file.read_text())
        if phase == "silent":
            raise Unreachable("no route")
        return State(phase, reason, code)

    def lines(self) -> Iterator[str]:
        yield "a line of the job\n"

    def signal(self, number: int) -> None:
        raise NotImplementedError

    def cancel(self) -> None:
        self.file.write_text(json.dumps([ENDED, "", 130]))


class Fake(Submitter):
    """An engine whose jobs are files."""

    engine = "fake"

    def render(self, job: Job) -> str:
        return ""

    def submit(self, job: Job) -> Handle:
        return FakeJob(job.engine_folder)

    def living(self, folders: Sequence[Path]) -> Living | None:
        return Living(FakeJob(folders[0]), (), folders[0].parent)


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the state of the only job."""
    monkeypatch.setenv("TRAINER_HOME", str(tmp_path / "home"))
    folder = tmp_path / "run"
    (folder / ENGINE).mkdir(parents=True)
    job = Job("far", ("+recipe=digits_lenet",), folder, ("python",), str(tmp_path))
    for _ in range(2):  # the same command again is the same row
        elsewhere.note(Fake(), job, "log")
    return folder / ENGINE / "state"


def ps(capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert queue_verbs.answer("ps", []) == 0
    return capsys.readouterr().out.splitlines()[1:]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (["pending", "Resources", 0], ("queued", "Resources")),
        (["running", "", 0], ("running", "fake: 1 core")),
        (["requeued", "a host was lost", 0], ("pre-empted", "a host was lost")),
        (["silent", "", 0], ("submitted", "fake does not answer: no route")),
        (["ended", "", 3], ("failed", "exit code 3")),
        (["ended", "", 0], ("done",)),
    ],
)
def test_ps_shows_what_the_engine_says(
    state: list[object], words: tuple[str, ...], said: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said.write_text(json.dumps(state))
    (row,) = ps(capsys)
    assert all(word in row for word in words), row


def test_an_end_is_kept_and_not_asked_for_again(said: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said.write_text(json.dumps(["ended", "", 0]))
    ps(capsys)
    said.unlink()
    assert " done " in ps(capsys)[0] and Queue().run(1).state == DONE  # type: ignore[union-attr]


def test_its_handle_cancels_and_has_the_lines(said: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said.write_text(json.dumps(["running", "", 0]))
    assert queue_verbs.answer("logs", ["1"]) == 0 and "a line of the job" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"retry 1: it is a run of fake, and running.*resume=auto"):
        queue_verbs.answer("retry", ["1"])
    assert queue_verbs.answer("cancel", ["1"]) == 0 and "Fake job 7" in capsys.readouterr().out
    assert queue_verbs.answer("logs", ["-f", "1"]) == 130 and capsys.readouterr().out
    assert " cancelled " in ps(capsys)[0]
    for verb in ("cancel", "resume"):  # the queue would start it here
        with pytest.raises(UserError, match=f"{verb} 1: it is.* cancelled"):
            queue_verbs.answer(verb, ["1"])


def test_no_runner_starts_it(said: Path) -> None:
    from trainer.service.queue import Slots
    from trainer.service.runner import Runner

    queue = Queue()
    assert not Runner(queue, Slots((0,), (), 1 << 40)).turn()
    assert queue.run(1).state == SUBMITTED  # type: ignore[union-attr]
