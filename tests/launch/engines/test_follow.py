"""The follower of a submitted job: what it prints, forwards, and how it ends."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.errors import Interrupted, RunFailed, RunPreempted
from trainer.launch.engines.contract import Handle, State, Unreachable
from trainer.launch.engines.engine_folder import LogReader
from trainer.launch.engines.follow import PATIENCE_S, JobFailed, follow

PENDING, RUNNING = State("pending", "Resources"), State("running", "n1")


class Scripted(Handle):
    """A job that goes through these states, one at each question; a callable among them is called instead."""

    name, cancels, log = "Fake job 7", "cancel 7", "/log"

    def __init__(self, *states: Any, text: str = "") -> None:
        self.states, self.text, self.done = list(states), text, list[str]()

    def state(self) -> State:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return state if isinstance(state, State) else state()

    def lines(self) -> Iterator[str]:
        text, self.text = self.text, ""
        yield from [text] if text else []

    def signal(self, number: int) -> None:
        self.done.append(signal.Signals(number).name)

    def cancel(self) -> None:
        self.done.append("cancelled")

    def hurry(self) -> None:
        self.done.append("hurried")

    def end_is_shown(self) -> None:
        self.done.append("shown")


class Writes(Scripted):
    """A job with a log, to which it appends these bytes, one at each question."""

    def __init__(self, path: Path, *pieces: bytes) -> None:
        self.reader, self.path = LogReader(path), path
        super().__init__(*(self.writing(piece) for piece in pieces), State("ended"))

    def writing(self, piece: bytes) -> Any:
        def written() -> State:
            with self.path.open("ab") as log:
                log.write(piece)
            return RUNNING

        return written

    def lines(self) -> Iterator[str]:
        return self.reader.lines()


class Clock:
    """Time that passes by sleeping alone."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def followed(job: Scripted) -> str:
    out, clock = io.StringIO(), Clock()
    follow(job, out, clock, clock.sleep)
    return out.getvalue()


def unreachable() -> State:
    raise Unreachable("slurmctld is away")


def test_changes_of_state_are_printed_once_with_their_reason_and_the_lines_in_between() -> None:
    again = State("requeued", "BeginTime")
    said = followed(Scripted(PENDING, PENDING, RUNNING, RUNNING, again, RUNNING, State("ended"), text="[Epoch 0]\n"))
    assert said.splitlines() == [
        "[Epoch 0]",
        "Fake job 7: pending (Resources)",
        "Fake job 7: running (n1)",
        "Fake job 7: requeued (BeginTime)",
        "Fake job 7: running (n1)",
        "Fake job 7: ended with exit code 0",
    ]


def test_last_line_that_a_killed_process_leaves_without_its_end_is_shown(tmp_path: Path) -> None:
    said = followed(Writes(tmp_path / "log", b"[Epoch 0]\n", b"ValueError: the numb"))
    assert said.splitlines() == [
        "[Epoch 0]",
        "Fake job 7: running (n1)",
        "ValueError: the numb",
        "Fake job 7: ended with exit code 0",
    ]


def test_progress_bar_is_shown_while_nothing_follows_and_a_line_that_is_just_written_is_whole(tmp_path: Path) -> None:
    """The euro's three bytes come in two pieces."""
    job = Writes(tmp_path / "log", b"", b"loss: ", b"0.5 \xe2", b"\x82\xac\n10%", b"", b"\r20%", b"\r30%", b"", b"\n")
    out, clock, seen = io.StringIO(), Clock(), list[str]()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if seen[-1:] != [out.getvalue()]:
            seen.append(out.getvalue())

    follow(job, out, clock, sleep)
    first = "Fake job 7: running (n1)\n"
    whole = f"{first}loss: 0.5 \N{EURO SIGN}\n"
    assert seen == [first, whole, f"{whole}10%", f"{whole}10%\r20%\r30%", f"{whole}10%\r20%\r30%\n"]


def test_change_of_state_is_on_a_line_of_its_own(tmp_path: Path) -> None:
    job = Writes(tmp_path / "log", b"10%", b"")
    job.states.insert(-1, State("requeued"))
    assert followed(job).splitlines() == [
        "Fake job 7: running (n1)",
        "10%",
        "Fake job 7: requeued",
        "Fake job 7: ended with exit code 0",
    ]


@pytest.mark.parametrize(
    ("code", "kind"),
    [(1, JobFailed), (2, JobFailed), (3, JobFailed), (137, JobFailed), (75, RunPreempted), (130, Interrupted)],
)
def test_exit_code_is_the_jobs(code: int, kind: type[BaseException]) -> None:
    with pytest.raises(kind, match=f"Fake job 7 ended with exit code {code}") as raised:
        followed(Scripted(RUNNING, State("ended", "", code)))
    assert raised.value.exit_code == code  # type: ignore[attr-defined]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_is_forwarded_and_the_job_is_followed_to_its_end(number: signal.Signals) -> None:
    def signalled() -> State:
        os.kill(os.getpid(), number)
        return RUNNING

    job = Scripted(RUNNING, signalled, State("ended", "", 75))
    with pytest.raises(RunPreempted):
        followed(job)
    assert job.done == [number.name, "shown"]


def test_signal_cancels_a_job_that_waits() -> None:
    def signalled() -> State:
        os.kill(os.getpid(), signal.SIGTERM)
        return PENDING

    job = Scripted(PENDING, signalled, PENDING)
    with pytest.raises(RunPreempted, match="had not started, and is cancelled"):
        followed(job)
    assert job.done == ["cancelled", "shown"]


def pressed() -> State:
    signal.raise_signal(signal.SIGINT)
    return RUNNING


def test_ctrl_c_cancels() -> None:
    job = Scripted(RUNNING, pressed)
    with pytest.raises(Interrupted, match="Fake job 7 is cancelled"):
        followed(job)
    assert job.done == ["cancelled", "shown"]


def test_second_ctrl_c_does_not_end_what_cancels_the_job() -> None:
    class Slow(Scripted):
        def cancel(self) -> None:
            signal.raise_signal(signal.SIGINT)
            super().cancel()

    job = Slow(RUNNING, pressed)
    with pytest.raises(Interrupted, match="Fake job 7 is cancelled"):
        followed(job)
    assert job.done == ["hurried", "cancelled", "shown"]


def test_silent_engine_is_waited_for_and_then_named_with_how_to_cancel() -> None:
    assert "running" in followed(Scripted(unreachable, unreachable, RUNNING, State("ended")))
    job = Scripted(RUNNING, unreachable)
    with pytest.raises(RunFailed, match=r"slurmctld is away\nFake job 7 may go on without this command.*cancel 7"):
        followed(job)
    assert job.done == [], "its end was not shown"


def test_handlers_of_signals_are_as_before() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    followed(Scripted(State("ended")))
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)] == before
    assert PATIENCE_S >= 60
