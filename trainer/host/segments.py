"""Anonymous memory (memfd) shared by processes of one user; it is freed when all of them have ended."""

from __future__ import annotations

import fcntl
import mmap
import os

SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0) | getattr(fcntl, "F_SEAL_SEAL", 0)
AT_ONCE = getattr(mmap, "MAP_POPULATE", 0)
"""Flag of mmap that allocates all pages at once."""


def make(size: int) -> tuple[int, mmap.mmap]:
    """Make shared memory of ``size`` bytes; returns its file descriptor, which others open, and its mapping here.

    Raises:
        OSError: the system has no memfd, or too little memory.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    descriptor = os.memfd_create("trainer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)
        os.posix_fallocate(descriptor, 0, size)  # too little memory is an error here, and not a signal later
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        return descriptor, mmap.mmap(descriptor, size, mmap.MAP_SHARED | AT_ONCE)
    except OSError:
        os.close(descriptor)
        raise


def attach(process: int, descriptor: int, inode: int, writable: bool) -> mmap.mmap:
    """Map the shared memory that another process has made, and that cannot shrink.

    Raises:
        FileNotFoundError: it is gone. OSError: it cannot be opened.
    """
    flags = os.O_RDWR if writable else os.O_RDONLY
    own = os.open(f"/proc/{process}/fd/{descriptor}", flags | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(own)
        if status.st_ino != inode or fcntl.fcntl(own, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise FileNotFoundError("another file is there")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(own, status.st_size, mmap.MAP_SHARED | AT_ONCE, protection)
    finally:
        os.close(own)


def what_lacks() -> str:
    """Return why processes on this machine cannot share memory by memfd, or '' if they can."""
    try:
        descriptor, memory = make(mmap.PAGESIZE)
    except OSError as error:
        return error.strerror or str(error)
    try:
        attach(os.getpid(), descriptor, os.fstat(descriptor).st_ino, writable=True).close()
    except OSError as error:
        return error.strerror or str(error)
    finally:
        memory.close()
        os.close(descriptor)
    return ""
