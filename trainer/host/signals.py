"""Signals while a job runs and while it closes, and an alarm that interrupts a call after a time limit."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from trainer.errors import Interrupted


@contextlib.contextmanager
def termination_raises() -> Iterator[None]:
    """Context manager: SIGTERM, SIGHUP and SIGQUIT raise Interrupted in the main thread.

    A signal that is ignored stays ignored, as SIGHUP under nohup. The caller's handlers are put back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise Interrupted(f"got {signal.Signals(number).name}")

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class TooLong(BaseException):
    """Raised when a call takes longer than :func:`within` allows.
    No ``Exception``: the call may try again after each of these."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Context manager: after ``seconds``, SIGALRM raises TooLong in the main thread.
    Python delivers signals to the main thread alone: in another thread there is no limit.

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
    others = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # and each second, where the call goes on all the same
    try:
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *others)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Context manager: ignores SIGINT, SIGTERM and SIGHUP, for the few bounded seconds of closing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {n: signal.signal(n, signal.SIG_IGN) for n in numbers}
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
