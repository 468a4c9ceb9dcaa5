"""A user's launcher of commands that makes a mistake: one sentence names it, and what it has started is ended."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.notes import Notes
from trainer.errors import RunFailed
from trainer.host import private
from trainer.host.notes_board import NoNote
from trainer.launch import supervisor, task_process
from trainer.launch.forkserver import launch
from trainer.launch.rendezvous import Rendezvous
from trainer.launch.started_process import Role
from trainer.launch.task_process import main
from trainer.launch.tasks import Commands, Task, TaskHandle


class Payload:
    """What the processes would get."""

    def as_dict(self) -> dict[str, Any]:
        return {}


class Own:
    """Starts a sleeping program for each process; what it returns is up to the test."""

    def __init__(self, handle: Callable[[subprocess.Popen[bytes]], Any], first: int = 0) -> None:
        self.handle, self.first = handle, first
        self.started: list[subprocess.Popen[bytes]] = []

    def launch(self, task: Task) -> Any:
        self.started.append(subprocess.Popen(["sleep", "300"]))
        return self.started[-1] if task.rank < self.first else self.handle(self.started[-1])


def failure(own: Own, logs: Path, timeout_s: float = 300) -> str:
    """The message with which two workers of this launcher fail."""
    role = Role("worker", 2, "none:none", ["cpu", "cpu"])
    with pytest.raises(RunFailed) as caught:
        launch([role], Payload(), logs, Rendezvous(), Commands(own.launch, "my.Own", timeout_s))
    return str(caught.value)


def test_process_that_never_begins_ends_the_run_with_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LINGER_S", 0)
    own = Own(lambda process: process)
    assert failure(own, tmp_path, 0.2).splitlines() == [
        (
            "worker 0: has not begun within 0.2 s (launch.timeout_s). Its launcher must run task.command with the "
            "variables of task.environment (it runs: sleep 300)"
        ),
        f"  its log: {tmp_path}/workerlog.0",
    ]
    assert [process.wait(5) for process in own.started] == [-9, -9]


def test_process_that_has_begun_is_not_asked_again(tmp_path: Path) -> None:
    seconds, notes = iter([0.0, 1.0, 9.0]), Board()
    task = Task("worker", 1, "cpu", (), {}, tmp_path / "log")
    handle = TaskHandle(task, Own(lambda process: None), notes, 5, lambda: next(seconds))  # type: ignore[arg-type]
    handle.poll()
    assert handle.failure is None and not handle.arrived
    notes.set("begun", "")
    handle.poll()
    handle.poll()
    assert handle.failure is None and handle.arrived


class Board(Notes):
    """One that is its own part.

    Attributes:
        gone: with host 0.
    """

    gone = False

    def under(self, prefix: str) -> Board:
        return self

    def set(self, key: str, value: str) -> None:
        if self.gone:
            raise NoNote("127.0.0.1:1 did not answer")
        super().set(key, value)


def test_a_run_ends_though_the_board_is_gone_at_its_end(tmp_path: Path) -> None:
    """Of two commands one has been told that it may leave, while the board was there."""
    notes = Board()
    sleeping = [subprocess.Popen(["sleep", "300"]) for _ in range(2)]
    tasks = [Task("worker", rank, "cpu", (), {}, tmp_path / "log") for rank in range(2)]
    handles = [TaskHandle(task, process, notes, 5) for task, process in zip(tasks, sleeping, strict=True)]  # type: ignore[arg-type]
    handles[0].dismiss()
    assert notes.changes == 1
    notes.gone = True
    handles[0].dismiss()
    supervisor.end(handles, 5.0)
    assert [process.poll() for process in sleeping] == [-9, -9]


class NoKill:
    """A handle that lacks a method."""

    def poll(self) -> None:
        """Runs."""


class OddPoll(NoKill):
    """A handle whose answer is no exit code."""

    def poll(self) -> str:  # type: ignore[override]
        return "running"

    def kill(self) -> None:
        """Ends nothing."""


class Breaks(NoKill):
    """A handle that breaks."""

    def poll(self) -> None:
        raise KeyError("state")

    def kill(self) -> None:
        raise PermissionError(1, "Operation not permitted")


def raises(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize(
    ("handle", "says"),
    [
        (
            lambda process: None,
            (
                "my.Own: launch returned None for worker 1. Return something with poll() and kill(), such as a "
                "subprocess.Popen"
            ),
        ),
        (
            lambda process: process.pid,
            "my.Own: launch returned something of type int, which has no poll and no kill for worker 1",
        ),
        (lambda process: NoKill(), "my.Own: launch returned something of type NoKill, which has no kill for worker 1"),
        (
            lambda process: OddPoll(),
            (
                "what launch returned for worker 1: poll() returned something of type str, not an exit code, or "
                "None while the process runs"
            ),
        ),
        (lambda process: Breaks(), "what launch returned for worker 1 broke in poll, "),
        (lambda process: raises(KeyError("node")), "my.Own broke in launch of worker 1, "),
        (
            lambda process: raises(FileNotFoundError(2, "No such file or directory", "numactll")),
            "my.Own cannot start worker 1: [Errno 2] No such file or directory: 'numactll'",
        ),
    ],
)
def test_what_cannot_be_watched_is_named_and_the_others_end(handle: Any, says: str, tmp_path: Path) -> None:
    own = Own(handle, first=1)
    try:
        assert failure(own, tmp_path).startswith(says)
        assert own.started[0].wait(5) == -9, "the supervisor ends those it knows"
    finally:
        own.started[1].kill()


def test_process_of_a_run_that_ends_as_it_begins_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher removes the file between two steps of the process."""
    private.write(tmp_path / "worker.0.json", "{}")
    monkeypatch.setattr(task_process, "_start_of", lambda **_: (tmp_path / "worker.0.json").unlink())
    assert main(tmp_path / "worker.0.json") == 1
    assert capsys.readouterr().err == "the run ended before this process began\n"


def test_process_of_a_run_that_has_ended_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tmp_path / "worker.0.json") == 1
    assert capsys.readouterr().err == "the run ended before this process began\n"
