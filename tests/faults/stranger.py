"""Another user of this machine: ``python -m tests.faults.stranger FOLDER MARKER`` takes every name that it sees in the
folder.

Each name that comes or goes there is made again at once, holding a pickle that, where it is loaded, touches MARKER.
Prints ``ready`` when it watches, and each name that it has seen. Ends when its input is closed.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534
IN_CREATE, IN_MOVED_TO, IN_DELETE = 0x100, 0x80, 0x200
EVENT = struct.Struct("iIII")


@contextmanager
def folder_for_all(mode: int) -> Iterator[Path]:
    """Context manager: a temporary folder that all users reach, unlike a test's own."""
    folder = Path(tempfile.mkdtemp(prefix="for-all-", dir="/tmp"))
    folder.chmod(mode)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


class Bomb:
    """What it means is known when it is loaded."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"id > {self.marker}",)


def become_nobody() -> None:
    """From now on this process is another user's."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def said_by_nobody(what: Callable[[], object]) -> str:
    """What a function returns, or its error, in a child process of another user."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            become_nobody()
            try:
                answer = str(what())
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
            os.write(writing, answer.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


def plant(path: str, bomb: bytes) -> None:
    """Put the bomb there, where the name is free."""
    try:
        with open(path, "xb") as file:
            file.write(bomb)
        os.chmod(path, 0o666)
    except OSError:
        return


def main(folder: str, marker: str) -> None:
    become_nobody()
    os.umask(0)
    bomb = pickle.dumps(Bomb(marker))
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    if libc.inotify_add_watch(watch, folder.encode(), IN_CREATE | IN_MOVED_TO | IN_DELETE) < 0:
        sys.exit(f"cannot watch {folder}")
    print("ready", flush=True)
    seen: list[str] = []
    while True:
        ready, _, _ = select.select([watch, sys.stdin], [], [])
        if sys.stdin in ready and not sys.stdin.readline():
            break
        if watch in ready:
            events, at = os.read(watch, 1 << 16), 0
            while at < len(events):
                _, _, _, length = EVENT.unpack_from(events, at)
                name = events[at + EVENT.size : at + EVENT.size + length].rstrip(b"\0").decode()
                at += EVENT.size + length
                plant(os.path.join(folder, name), bomb)
                seen.append(name)
    print("\n".join(dict.fromkeys(seen)))


if __name__ == "__main__":
    main(*sys.argv[1:])
