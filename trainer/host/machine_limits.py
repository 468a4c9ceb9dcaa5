"""Turns errors that come from a limit of the machine into sentences: processes and threads, open files, the size of a
file, shared memory in /dev/shm."""

from __future__ import annotations

import errno
import os
import resource
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.errors import RunFailed
from trainer.wording import sized

SHARED = Path("/dev/shm")  # shown and measured, never written to  # nosec B108
IN_SHARED = ("multiprocessing/synchronize.py", "multiprocessing/heap.py", "multiprocessing/shared_memory.py")
"""Modules of Python with files in /dev/shm; their errors name no file."""
STARTING = ("popen_fork.py", "popen_spawn_posix.py", "forkserver.py", "util.py", "subprocess.py")
"""Modules of Python that start processes."""
NO_THREAD = ("can't start new thread", "Resource temporarily unavailable")
"""Messages of Python, and of C++ in torch."""
FILES = 4096
"""Number of open files that suffices for most runs."""
LESS = "fewer launch.workers, launch.servers, data.num_workers or execution.threads"


def reached(error: BaseException) -> str:
    """The sentence for the limit that caused an error, with what to do; '' if no known limit did."""
    if isinstance(error, OSError) and error.filename is None:
        where = _raised_in(error)
        if error.errno == errno.ENOSPC and where.endswith(IN_SHARED):
            return _full_shared_memory()
        if error.errno == errno.EAGAIN and os.path.basename(where) in STARTING:
            return no_process()
    said = str(error)
    number = error.errno if isinstance(error, OSError) else _number_in(said)
    if number in (errno.EMFILE, errno.ENFILE):
        return _no_descriptor()
    if number == errno.EFBIG:
        return _largest_file(error)
    if isinstance(error, RuntimeError) and said.rstrip(".") in NO_THREAD:
        return no_process()
    if isinstance(error, RuntimeError) and "shared memory" in said and os.strerror(errno.ENOSPC) in said:
        return _full_shared_memory()
    return ""


def no_process() -> str:
    """The sentence for a machine that starts no further process or thread for this user."""
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    known = "" if most == resource.RLIM_INFINITY else f": ulimit -u is {most}, for all processes of this user"
    return (
        f"the machine starts no further process or thread{known}. Raise that limit, or a container's (docker run "
        f"--pids-limit), or take {LESS}"
    )


def _number_in(said: str) -> int:
    """The error number for a message of a library; 0: it is none of these."""
    known = {os.strerror(number): number for number in (errno.EMFILE, errno.ENFILE, errno.EFBIG)}
    return next((number for words, number in known.items() if words in said), 0)


def _no_descriptor() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = hard == resource.RLIM_INFINITY or hard >= FILES
    instead = (
        f"Type ulimit -n {FILES} before the command"
        if raised
        else "Raise it (in a new shell, or nofile in limits.conf)"
    )
    return f"a process may open no further file: ulimit -n is {soft if raised else hard}. {instead}, or take {LESS}"


def _largest_file(error: BaseException) -> str:
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    name = str(getattr(error, "filename", None) or "a file")
    limit = "the disk's format" if most == resource.RLIM_INFINITY else f"ulimit -f, {sized(most)}"
    return (
        f"{name} cannot be written: it would be larger than a file may be ({limit}). Type ulimit -f unlimited "
        f"before the command"
    )


@contextmanager
def named() -> Iterator[None]:
    """Context manager: an error that comes from a limit of the machine becomes a sentence.

    Raises:
        RunFailed: an error came from a limit.
    """
    try:
        yield
    except (OSError, RuntimeError, ImportError) as error:
        if sentence := reached(error):
            raise RunFailed(sentence) from error
        raise


def _raised_in(error: BaseException) -> str:
    """The file whose code raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename if frames else ""


def _full_shared_memory() -> str:
    try:
        disk = os.statvfs(SHARED)
        room = f" ({sized(disk.f_bavail * disk.f_frsize)} of {sized(disk.f_blocks * disk.f_frsize)} are free)"
    except OSError:
        room = ""
    return (
        f"shared memory is full: {SHARED}{room}. Give it more (docker run --shm-size 1g; mount -o remount,size=1g "
        f"{SHARED}), or data.num_workers=0"
    )
