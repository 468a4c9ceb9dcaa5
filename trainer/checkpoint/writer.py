"""Writes a process's part of a checkpoint in a thread, while the training goes on.

States of a checkpoint that is being written, and who moves it:

    held       the process has copied its state (``Packed``); only this copy delays the training
    written    its file and the file's seal are in ``step-N.partial`` (:func:`write_part`, in the thread)
    failed     or ``NAME.failed`` is there with the reason (:func:`leave_failure`)
    complete   the process that completes it has found all parts, has written ``checkpoint.json``, and has renamed the
               folder (:func:`complete`)
    given up   it has found a failure, a lost writer or no new byte for ``patience_s``; the training goes on

What always holds: a process writes one checkpoint at a time, and waits for it before the next. A failure to write never
ends the training: it is a line of text, and the older checkpoint stays. Only the completing process renames the folder.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.checkpoint import durable_folder, store
from trainer.checkpoint.durable_folder import final_folder
from trainer.checkpoint.tensor_tree import Packed
from trainer.errors import UserError, why
from trainer.host.files import replace_file

POLL_S = 0.02


class BackgroundWriter:
    """One write at a time, in a thread.

    Args:
        background: False: :meth:`begin` returns when everything is on the disk.
    """

    def __init__(self, background: bool = True) -> None:
        self.background = background
        self.thread: threading.Thread | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Run ``work``, which raises nothing, after the work before."""
        self.wait()
        if self.background:
            self.thread = threading.Thread(target=work, name="checkpoint")
            self.thread.start()
        else:
            work()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the work that was begun, at most ``seconds``; returns whether it is done."""
        if self.thread is not None:
            self.thread.join(seconds)
            if self.thread.is_alive():
                return False
            self.thread = None
        return True


def write_part(folder: Path, name: str, packed: Packed) -> str:
    """Write a worker's part of a checkpoint; returns '' or why that failed, which the completing process reads too."""
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
    """Wait until all parts of a checkpoint are written, and complete it; returns '' or why it was given up.

    Args:
        about: content of ``checkpoint.json``.
        names: file names of all parts.
        patience_s: longest wait while the parts do not grow.
        gone: whether the process that writes the part of that name is lost.
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
            if (now := _bytes_of(folder)) != size:  # a large part takes long
                size, until = now, time.monotonic() + patience_s
            if time.monotonic() > until:
                return f"{', '.join(missing)} was not written within {patience_s:g} s"
            time.sleep(POLL_S)
        durable_folder.write(folder, store.ABOUT, lambda path: path.write_text(about))
        store.complete(folder, names)
    except (OSError, UserError) as error:
        if isinstance(error, UserError):
            return str(error)
        return f"{final_folder(folder).name} cannot be written: {why(error)}"
    return ""


def _bytes_of(folder: Path) -> int:
    """The bytes of the unfinished checkpoint so far."""
    size = 0
    for path in durable_folder.partial_of(folder).glob("*"):
        with contextlib.suppress(FileNotFoundError):  # it was renamed meanwhile
            size += path.stat().st_size
    return size


def failure_of(folder: Path, name: str) -> Path:
    """The file in an unfinished checkpoint that says why a part could not be written."""
    return durable_folder.partial_of(folder) / f"{name}.failed"


def leave_failure(folder: Path, name: str, why_not: str) -> bool:
    """Tell the completing process that a part will not come. Returns whether it was told, or the checkpoint is gone."""
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
