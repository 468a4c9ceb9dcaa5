"""Follows a submitted job on the screen: its changes of state, its lines, and its end; forwards signals to it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from trainer.errors import Interrupted, RunFailed, RunPreempted, UserError
from trainer.launch.engines.contract import ENDED, PENDING, Handle, State, Unreachable

FASTEST_S, SLOWEST_S = 0.5, 10.0
"""Time between two questions to the engine: short while states and lines change, and longer while nothing happens."""
PATIENCE_S = 120.0
"""So long the engine may be silent."""
LAST_LINES_S = 10.0
"""Longest wait for the last lines: a shared disk may show them late."""
FORWARDED = (signal.SIGTERM, signal.SIGUSR1)


class JobFailed(RunFailed):
    """The error for a job that ended with another exit code than 0; this process ends with the same."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


def follow(handle: Handle, out: TextIO, clock: Callable[[], float] = time.monotonic, sleep: Any = time.sleep) -> None:
    """Follow a job to its end.

    Raises:
        JobFailed, UserError, RunPreempted, Interrupted: by the exit code of the job, the same as of a run on this host.
        RunFailed: the engine does not answer; the job may go on.
    """
    follower = _Follower(handle, out, clock, sleep)
    with _forwarding(follower):
        try:
            state = follower.run()
            handle.end_is_shown()
        except KeyboardInterrupt:
            follower.ask(handle.cancel)
            follower.wind_up()
            handle.end_is_shown()
            error = Interrupted(f"got SIGINT: {handle.name} is cancelled{handle.cancelled and f'. {handle.cancelled}'}")
            if handle.resumes:
                error.add_note(handle.resumes)
            raise error from None
    _raise(handle, state)


class _Follower:
    """Prints states and lines of one job."""

    def __init__(self, handle: Handle, out: TextIO, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self.handle, self.out, self.clock, self.sleep = handle, out, clock, sleep
        self.before = State("")
        self.is_within_a_line = False
        self.signals: list[int] = []

    def run(self) -> State:
        """Print until the job has ended; returns its last state."""
        pause, heard = FASTEST_S, self.clock()
        while True:
            while self.signals:
                self._forward(self.signals.pop(0))
            try:
                state, heard = self.handle.state(), self.clock()
            except Unreachable as error:
                if self.clock() - heard > PATIENCE_S:
                    raise RunFailed(self._unreachable(error)) from None
                self.sleep(SLOWEST_S / 5)
                continue
            if state.phase == ENDED:
                self._print_last_lines()
                self._print_state(state)
                return state
            printed = self._print_lines()
            changed = self._print_state(state)
            pause = FASTEST_S if changed or printed else min(SLOWEST_S, pause * 1.5)
            until = self.clock() + pause
            while self.clock() < until and not self.signals:
                self.sleep(min(FASTEST_S, pause))

    def wind_up(self) -> None:
        """Print what a job that is cancelled still says, until it has ended; a second Ctrl-C ends it at once."""
        begun = self.clock()
        while self.clock() - begun < self.handle.winds_up_s:
            with suppress(Unreachable):
                if self.handle.state().phase == ENDED:
                    self._print_last_lines()
                    return
            self._print_lines()
            self.sleep(FASTEST_S)

    def ask(self, call: Callable[[], None]) -> None:
        """Ask the engine for something on the way out.

        Raises:
            RunFailed: it does not answer.
        """
        try:
            call()
        except Unreachable as error:
            raise RunFailed(self._unreachable(error)) from None

    def _forward(self, number: int) -> None:
        name = signal.Signals(number).name
        if self.before.phase == PENDING:
            self.ask(self.handle.cancel)
            self.handle.end_is_shown()
            raise RunPreempted(f"got {name}: {self.handle.name} had not started, and is cancelled")
        self.ask(lambda: self.handle.signal(number))
        self._print(f"{name} is forwarded; the run saves a checkpoint and ends")

    def _print_state(self, state: State) -> bool:
        if state == self.before:
            return False
        self._print(str(state))
        self.before = state
        return True

    def _print(self, news: str) -> None:
        """Print news of the job on a line of their own."""
        line_end = "\n" if self.is_within_a_line else ""
        print(f"{line_end}{self.handle.name}: {news}", file=self.out, flush=True)
        self.is_within_a_line = False

    def _print_lines(self) -> bool:
        printed = False
        for text in self.handle.lines():
            self.out.write(text)
            self.is_within_a_line = not text.endswith("\n")
            printed = True
        if printed:
            self.out.flush()
        return printed

    def _print_last_lines(self) -> None:
        """Print what still comes; the log of a shared disk may be late."""
        until = self.clock() + LAST_LINES_S
        while self._print_lines() and self.clock() < until:
            self.sleep(FASTEST_S)

    def _unreachable(self, error: Unreachable) -> str:
        follow = f". To follow it again: {self.handle.follows}" if self.handle.follows else ""
        return (
            f"the engine does not answer: {error}\n{self.handle.name} may go on without this command. "
            f"Its lines: {self.handle.log}. To cancel it: {self.handle.cancels}{follow}"
        )


@contextmanager
def _forwarding(follower: _Follower) -> Iterator[None]:
    """Context manager: SIGTERM and SIGUSR1 to this process go to the job. A first Ctrl-C raises KeyboardInterrupt; a
    second one would end what cancels the job, and is handed to it instead."""

    def note(number: int, frame: Any) -> None:
        follower.signals.append(number)

    def interrupt(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, lambda number, frame: follower.handle.hurry())
        raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in FORWARDED}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise(handle: Handle, state: State) -> None:
    """Raise the error whose exit code is the job's; 0: return."""
    message = f"{handle.name} {state}"
    if state.code == RunPreempted.exit_code:
        raise RunPreempted(message)
    if state.code == Interrupted.exit_code:
        raise Interrupted(message)
    if state.code == UserError.exit_code:
        raise JobFailed(f"{message}: its lines say what to type instead", state.code)
    if state.code:
        raise JobFailed(f"{message}. Its lines: {handle.log}", state.code)
