"""Writes a process's part of a checkpoint behind the training's back: the training waits for the copy alone."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.checkpoint import durable_folder, store
from trainer.checkpoint.life_folder import final_folder
from trainer.checkpoint.tensor_tree import Packed
from trainer.errors import UserError, why
from trainer.host.files import replace_file

LOOK_S = 0.02


class BackgroundWriter:
    """One write at a time, in a thread.

    Args:
        background: False: ``write`` returns when everything is on the disk.
    """

    def __init__(self, background: bool = True) -> None:
        self.background = background
        self.thread: threading.Thread | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Do it, after the one before; it raises nothing."""
        self.wait()
        if self.background:
            self.thread = threading.Thread(target=work, name="checkpoint")
            self.thread.start()
        else:
            work()

    def wait(self, seconds: float | None = None) -> bool:
        """Until what was begun is done, or for so long; returns whether it is."""
        if self.thread is not None:
            self.thread.join(seconds)
            if self.thread.is_alive():
                return False
            self.thread = None
        return True


def write_part(folder: Path, name: str, packed: Packed) -> str:
    """Write a worker's part of a checkpoint. Returns why it cannot be written, and leaves that for the one who
    completes the checkpoint; returns nothing if it is written."""
    try:
        durable_folder.write(folder, name, packed.write)
    except (OSError, UserError) as error:
        failed = f"{name} cannot be written: {why(error)}"
        leave_failure(folder, name, failed)
        return failed
    return ""


def complete(
    folder: Path, about: str, names: Sequence[str], patience_s: float, gone: Callable[[str], bool] = lambda name: False
) -> str:
    """Wait until all processes have written their parts of a checkpoint, and complete it; returns why it was given up,
    or nothing.

    Args:
        about: for ``checkpoint.json``.
        names: of all parts.
        patience_s: longest wait for parts while nothing of them is written.
        gone: whether who was to write the part of that name is no more.
    """
    try:
        size, until, partial = -1, 0.0, durable_folder.partial_of(folder)
        while missing := [name for name in names if not durable_folder.is_written(folder, name)]:
            for name in missing:
                if (failure := failure_of(folder, name)).is_file():
                    return failure.read_text() or f"{name} cannot be written"
                if gone(name) and not durable_folder.is_written(folder, name):
                    return f"{name} was not written: its worker was lost"
            if not partial.is_dir():
                return f"{partial.name} was removed while it was written"
            if (now := _bytes_of(folder)) != size:  # a large part takes its time
                size, until = now, time.monotonic() + patience_s
            if time.monotonic() > until:
                return f"{', '.join(missing)} was not written within {patience_s:g} s"
            time.sleep(LOOK_S)
        durable_folder.write(folder, store.ABOUT, lambda path: path.write_text(about))
        store.complete(folder, names)
    except (OSError, UserError) as error:
        if isinstance(error, UserError):
            return str(error)
        return f"{final_folder(folder).name} cannot be written: {why(error)}"
    return ""


def _bytes_of(folder: Path) -> int:
    """Of all that is written so far."""
    size = 0
    for path in durable_folder.partial_of(folder).glob("*"):
        with contextlib.suppress(FileNotFoundError):  # it has got its name meanwhile
            size += path.stat().st_size
    return size


def failure_of(folder: Path, name: str) -> Path:
    """The file in an unfinished checkpoint that tells why a process's part of it could not be written."""
    return durable_folder.partial_of(folder) / f"{name}.failed"


def leave_failure(folder: Path, name: str, why_not: str) -> bool:
    """Tell the one who completes a checkpoint that a process's part of it will not come. Returns whether that is told,
    or there is nobody to tell any more."""
    partial = durable_folder.partial_of(folder)
    if partial.is_symlink() or not partial.is_dir():
        return True
    failure = failure_of(folder, name)
    try:
        replace_file(failure, why_not)
    except OSError:
        with contextlib.suppress(OSError):
            failure.touch()  # an empty one where the disk is full
        return failure.is_file()
    return True
