"""Keeps some file descriptors of this process in reserve for files that must be written."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

RESERVE = 64


def keep_reserve() -> None:
    """Keep some file descriptors back, so that connections cannot take the last ones of this process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(hard - RESERVE, hard // 2), hard))


@contextmanager
def reserve() -> Iterator[None]:
    """Context manager: the file descriptors that were kept back may be used."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def all_taken() -> bool:
    """Whether no file descriptor is left but those kept back."""
    try:
        os.close(os.dup(1))
    except OSError:
        return True
    return False
