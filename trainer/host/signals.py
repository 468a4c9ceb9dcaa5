"""Signals that end a job, signals that ask it to save and leave, and an alarm that interrupts a call."""

from __future__ import annotations

import _thread
import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trainer.errors import AskedToLeave, Interrupted
from trainer.host import early_signals

LEAVE = "leave"
"""Key of the note by which a launcher, or a worker that got a signal, asks the run to save and end."""
NUMBERS = (signal.SIGTERM, signal.SIGUSR1)
OF_A_GROUP = (signal.SIGINT, *NUMBERS)
"""Signals that a terminal or a scheduler sends to all processes of a run; the launcher decides what they mean."""
TELL_S = 1.0
"""Longest wait, at the end, for the thread that reports a request."""


@contextlib.contextmanager
def termination_raises(can_go_on: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Context manager: SIGTERM, SIGUSR1, SIGHUP and SIGQUIT raise Interrupted in the main thread.

    A signal that is ignored stays ignored, as SIGHUP under nohup. The caller's handlers are restored at the end. SIGINT
    raises KeyboardInterrupt instead of calling a command's early handler.

    Args:
        can_go_on: whether the run can be resumed later; then SIGTERM and SIGUSR1 raise AskedToLeave.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        kind = AskedToLeave if number in NUMBERS and can_go_on() else Interrupted
        raise kind(f"got {signal.Signals(number).name}")

    before = {number: signal.getsignal(number) for number in (*NUMBERS, signal.SIGHUP, signal.SIGQUIT)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, stop)
    if early_signals.is_early(handler := signal.getsignal(signal.SIGINT)):
        before[signal.SIGINT] = handler
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def beginning_undisturbed() -> Iterator[None]:
    """Context manager: a helper process that is started inside begins with the signals of a group blocked, so that none
    ends it before it can call :func:`leave_to_launcher`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OF_A_GROUP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_launcher() -> None:
    """In a helper process: ignore the signals of a group. It ends with the process that has started it."""
    for number in OF_A_GROUP:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_A_GROUP)


class TooLong(BaseException):
    """Raised when a call takes longer than :func:`within` allows. No ``Exception``, which the call might catch."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Context manager: after ``seconds``, SIGALRM raises TooLong. In other threads than the main one there is no limit.

    Raises:
        TooLong: the time is over.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    running = True

    def stop(number: int, frame: Any) -> None:
        if running:
            raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    others = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again each second, if the call goes on
    try:
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *others)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Context manager: ignore all signals that end a job or ask it to leave, for the few seconds of closing.

    If nobody reads the output, a signal ends a command even then, as closing would take for ever.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (*NUMBERS, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, early_signals.while_closing())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signal_name(number: int) -> str:
    """The name of a signal; real-time signals have only numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def say_leaving(name: str, grace_s: float) -> None:
    """Print that a request to leave has come, and what follows."""
    print(f"\ngot {name}: saves a checkpoint and ends, within {grace_s:g} s; a second signal ends at once", flush=True)


@dataclass(frozen=True)
class Grace:
    """How a run reacts to a request to leave.

    Attributes:
        seconds: longest time from the request to the end.
        begun: whether there is something to save now. can_go_on: whether the run can be resumed later.
    """

    seconds: float
    begun: Callable[[], bool]
    can_go_on: Callable[[], bool] = lambda: True


class StopRequest:
    """A request by signal to save and leave; true once a signal has come.

    Args:
        accepts: whether a request is accepted now; otherwise the former handler is called.
        grace_s: longest time from the request to the end; None: no limit here.
        tell: called in a thread with the signal's name when a request has come.
    """

    def __init__(self, accepts: Callable[[], bool], grace_s: float | None, tell: Callable[[str], None]) -> None:
        self.accepts, self.grace_s, self.tell = accepts, grace_s, tell
        self.name = ""
        self.before: dict[int, Any] = {}
        self._at = 0.0
        self._late = False
        self._names: queue.SimpleQueue[str] = queue.SimpleQueue()  # a handler may put into it, whatever it interrupts
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="request-to-leave")

    def __bool__(self) -> bool:
        return bool(self.name)

    def _follow(self) -> None:
        if not (name := self._names.get()):
            return
        self.tell(name)
        if self.grace_s is not None and not self._over.wait(self.grace_s):
            self._late = True
            _thread.interrupt_main(signal.SIGTERM)

    def handle(self, number: int, frame: Any) -> None:
        """The signal handler: the first signal is a request; later ones call the former handler."""
        if not self.name and self.accepts():
            self.name, self._at = signal.Signals(number).name, time.monotonic()
            self._names.put(self.name)
        elif not self.name or self._late or time.monotonic() - self._at >= early_signals.AGAIN_S:
            self._as_before(number, frame)

    def _as_before(self, number: int, frame: Any) -> None:
        handler = self.before[signal.SIGTERM]
        if callable(handler):
            try:
                handler(number, frame)
            except AskedToLeave as error:
                if self.name:  # what was to be saved is not saved
                    raise Interrupted(str(error)) from None
                raise
        elif handler != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def begin(self) -> None:
        """Install the signal handlers; a signal that is ignored stays ignored."""
        self._thread.start()
        self.before = {number: signal.getsignal(number) for number in NUMBERS}
        for number, handler in self.before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self.handle)

    def end(self) -> None:
        """Restore the former signal handlers."""
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self._over.set()
        self._names.put("")
        self._thread.join(TELL_S)


@contextlib.contextmanager
def requests(
    accepts: Callable[[], bool] = lambda: True,
    grace_s: float | None = None,
    tell: Callable[[str], None] = lambda name: None,
) -> Iterator[StopRequest]:
    """Context manager: the first SIGTERM or SIGUSR1 asks this process to save and leave; yields the
    :class:`StopRequest`.

    A later one, or the end of the grace time, does what SIGTERM did before. See :class:`StopRequest` for the arguments.
    """
    request = StopRequest(accepts, grace_s, tell)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    request.begin()
    try:
        yield request
    finally:
        request.end()
