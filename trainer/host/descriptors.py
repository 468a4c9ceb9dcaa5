"""Reserves file descriptors of this process for files that must be written, and 0, 1 and 2 for standard streams."""

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
"""For each thread that uses the reserve now: the limit of all other threads."""


def open_standard() -> None:
    """Open /dev/null at each of the descriptors 0, 1 and 2 that is closed, as in a daemon.

    Otherwise the next opened file would get the descriptor, and libraries would print into that file.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= STANDARD_ERROR:
        os.set_inheritable(number, True)
    os.close(number)


def keep_reserve() -> None:
    """Reserve file descriptors, so that connections cannot take the last ones."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(hard - RESERVE, hard // 2), hard))


@contextmanager
def reserve() -> Iterator[None]:
    """Context manager: reserved file descriptors may be used, also by a process that is forked inside."""
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
    """Call ``work``, which opens a file; without a free descriptor, call it again with the reserve."""
    try:
        return work()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    with reserve():
        return work()


def all_taken() -> bool:
    """Whether only reserved file descriptors are left."""
    try:
        os.close(os.dup(1))
    except OSError:
        return True
    return False
