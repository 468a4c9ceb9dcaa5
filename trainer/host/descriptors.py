"""Keeps some file descriptors of this process in reserve for files that must be written, and 0, 1 and 2 for the
standard streams."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

RESERVE = 64
STANDARD_ERROR = 2
Result = TypeVar("Result")
_lock = threading.Lock()
_inside: list[int] = []
"""For each thread that may use the reserve now, how many descriptors others may have."""


def open_standard() -> None:
    """Open /dev/null at each of the descriptors 0, 1 and 2 that is closed, as daemons have them.

    Otherwise the next file that is opened would get the descriptor, and what a library prints would go into that file.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= STANDARD_ERROR:
        os.set_inheritable(number, True)
    os.close(number)


def keep_reserve() -> None:
    """Keep some file descriptors back, so that connections cannot take the last ones of this process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(hard - RESERVE, hard // 2), hard))


@contextmanager
def reserve() -> Iterator[None]:
    """Context manager: the file descriptors that were kept back may be used. A copy of the process made meanwhile may
    use them, too."""
    with _lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        _inside.append(_inside[0] if _inside else soft)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        with _lock:
            soft = _inside.pop()
            if not _inside:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def in_reserve(work: Callable[[], Result]) -> Result:
    """Do what opens a file; where no descriptor is left but those kept back, do it again with one of these."""
    try:
        return work()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    with reserve():
        return work()


def all_taken() -> bool:
    """Whether no file descriptor is left but those kept back."""
    try:
        os.close(os.dup(1))
    except OSError:
        return True
    return False
