"""What signals do while a job runs and while it is closed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from trainer.errors import Interrupted


@contextlib.contextmanager
def termination_raises() -> Iterator[None]:
    """SIGTERM and SIGHUP raise Interrupted in the main thread, as Ctrl-C raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise Interrupted(f"got {signal.Signals(number).name}")

    before = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """No signal interrupts the few seconds of closing; they are bounded."""
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
