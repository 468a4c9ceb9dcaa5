"""Cleans all text that a process prints of secrets and control characters; text that cannot be written is dropped."""

from __future__ import annotations

import contextlib
import errno
import io
import multiprocessing.util
import os
import select
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, ClassVar

from trainer.config import redact
from trainer.config.redact import HERE
from trainer.host import descriptors, files
from trainer.visible import visible


def clean(text: str) -> str:
    """Return a text for stdout or stderr: without secrets that this process knows and without control characters."""
    return visible(redact.text(text))


class Guard:
    """A text stream that cleans what is written to it, line by line; a lone carriage return ends a line as well.

    Code that prints (this package, a user's class, a traceback, a library) needs no care.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._begin()
        GUARDS.add(self)

    def _begin(self) -> None:
        self._pending: list[str] = []
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        """Write text: whole lines are passed on at once, the rest when it is complete or flushed."""
        with self._lock:
            lines, newline, rest = text.rpartition("\n")
            if newline:
                lines, self._pending = "".join((*self._pending, lines)), []
                self._emit(lines + newline)
            if rest:
                self._pending.append(rest)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write lines, as any text stream does."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Pass on all text, complete lines or not, except an end that may be the beginning of a secret."""
        with self._lock:
            pending = "".join(self._pending)
            held = redact.begun(pending)
            self._pending = [pending[len(pending) - held :]] if held else []
            if len(pending) > held:
                self._emit(pending[: len(pending) - held])
        with files.if_the_disk_takes():
            self.stream.flush()

    def finish(self) -> None:
        """Pass on all remaining text; no more will come."""
        with self._lock:
            pending, self._pending = "".join(self._pending), []
            if pending:
                self._emit(pending)
        with files.if_the_disk_takes():
            self.stream.flush()

    @property
    def buffer(self) -> _Bytes:
        """The stream's binary side, which cleans bytes as well."""
        return _Bytes(self)

    def _emit(self, text: str) -> None:
        text = clean(text.replace("\r\n", "\n").replace("\r", "\n"))
        with files.if_the_disk_takes():
            try:
                self.stream.write(text)
            except UnicodeEncodeError:
                encoding = getattr(self.stream, "encoding", None) or "ascii"
                self.stream.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _Bytes:
    """The binary side of a guarded stream, which guards bytes as text."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard

    def write(self, data: Any) -> int:
        """Write bytes; those that are not UTF-8 are spelled out."""
        data = bytes(data)
        self.guard.write(data.decode("utf-8", "surrogateescape"))
        return len(data)

    def flush(self) -> None:
        """Flush the text stream."""
        self.guard.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.guard.stream.buffer, name)


GUARDS: weakref.WeakSet[Guard] = weakref.WeakSet()


def _begin_anew() -> None:
    """In a forked process (one that reads data): drop the parent's partial line, and its lock."""
    for guard in GUARDS:
        guard._begin()


os.register_at_fork(after_in_child=_begin_anew)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Context manager: the standard streams are guarded; secrets learnt inside are forgotten at the end.

    Printing never fails, even if the reader leaves, the disk is full, or the descriptors are closed from the start.
    """
    descriptors.open_standard()
    with HERE.for_now(), restored():
        guard()
        try:
            yield
        finally:
            LogFile.wipe()


def wait_for(what: str) -> None:
    """Show on a terminal what the command waits for, until something is printed; elsewhere nothing."""
    file = _file(sys.stdout)
    if isinstance(file, LogFile) and file.isatty() and os.environ.get("TERM") != "dumb":
        file.show_fleeting(f"{what} ...")


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Context manager: restores the standard streams at the end, after flushing those that replaced them."""
    names = ("stdout", "stderr", "__stdout__", "__stderr__")
    before = {name: getattr(sys, name) for name in names}
    try:
        yield
    finally:
        for name in names:
            with contextlib.suppress(OSError, ValueError):  # the reader may be gone
                finish(getattr(sys, name))
        for name in names:
            setattr(sys, name, before[name])


def finish(stream: Any) -> None:
    """Pass on all text that was written to a guarded stream."""
    if stream is not None:
        (stream.finish if isinstance(stream, Guard) else stream.flush)()


def guard() -> None:
    """Guard the standard streams of this process from now on, also ``sys.__stdout__`` and ``sys.__stderr__``."""
    streams = ((sys.stdout, 1), (sys.stderr, 2))
    stand_in(*(s if isinstance(s, Guard) else Guard(_lasting(s, number)) for s, number in streams))


def stand_in(out: Any, error: Any) -> None:
    """Print to these streams from now on, also by ``sys.__stdout__`` and ``sys.__stderr__`` if they are the same."""
    for name, stream in (("stdout", out), ("stderr", error)):
        own = getattr(sys, f"__{name}__")
        if own is None or unguarded(own) is unguarded(getattr(sys, name)):
            own = stream
        elif not isinstance(own, Guard):
            own = Guard(own)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", own)


def confide(payload: Any) -> None:
    """Guard the streams of a started process, and learn the secrets that its launcher knows."""
    HERE.learn(getattr(payload, "secrets", ()))
    guard()
    for stream in (sys.stdout, sys.stderr):
        multiprocessing.util.Finalize(None, finish, (stream,), exitpriority=0)


class LogFile(io.FileIO):
    """The file of a log or of the screen; writing to it never raises.

    Bytes that a full disk refuses are dropped, and their number is written when there is room again. After any other
    error (the reader is gone, the terminal is closed) nothing more is written.

    Attributes:
        left_out: number of dropped bytes. error: its error number; 0: none. gone: the error is permanent.
        fleeting: the terminal's file that shows a fleeting line, and the process that shows it.
    """

    left_out, error, gone = 0, 0, False
    fleeting: ClassVar[tuple[LogFile, int] | None] = None

    def show_fleeting(self, text: str) -> None:
        """Show a line that the next text on stdout or stderr replaces."""
        self.wipe()
        self.write(text.encode())
        LogFile.fleeting = self, os.getpid()

    @classmethod
    def wipe(cls) -> None:
        """Remove the fleeting line; a forked process leaves that to the process that shows it."""
        shown, LogFile.fleeting = LogFile.fleeting, None
        if shown is not None and shown[1] == os.getpid():
            shown[0].write(b"\r\x1b[K")

    def write(self, data: Any) -> int:
        """Append bytes, if that is possible."""
        if LogFile.fleeting is not None:
            self.wipe()
        size = memoryview(data).nbytes
        if self.gone:
            return size
        try:
            if self.left_out:
                self._write_all(b"\n%d bytes of this log were left out: the disk was full\n" % self.left_out)
                self.left_out = 0
            self._write_all(data)
        except OSError as error:
            self.error = error.errno or errno.EIO
            self.gone = self.error not in files.FULL
            self.left_out += size
        return size

    def _write_all(self, data: Any) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            if (count := super().write(rest)) is None:  # another process has made the shared descriptor non-blocking
                select.select([], [self], [])
            rest = rest[count or 0 :]


def _lasting(stream: Any, number: int) -> Any:
    """A stream of that descriptor on a :class:`LogFile`; other streams, as in a notebook or a test, unchanged."""
    if stream is None:  # Python found the descriptor closed
        file = LogFile(number, "wb", closefd=False)
        file.error, file.gone = errno.EBADF, True
        return io.TextIOWrapper(file, "utf-8", "backslashreplace", write_through=True)
    try:
        if stream.fileno() != number or isinstance(_file(stream), LogFile):
            return stream
        with contextlib.suppress(OSError):
            stream.flush()
    except (OSError, ValueError, AttributeError):
        return stream
    raw = LogFile(number, "wb", closefd=False)
    through = getattr(stream, "write_through", False)  # python -u: no buffer
    return io.TextIOWrapper(
        raw if through else io.BufferedWriter(raw),  # type: ignore[arg-type]
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=getattr(stream, "line_buffering", False),
        write_through=through,
    )


def _file(stream: Any) -> Any:
    buffer = getattr(unguarded(stream), "buffer", None)
    return getattr(buffer, "raw", buffer)


def not_taken() -> str:
    """Which standard stream could not be written and why, as ``standard output: Broken pipe``; '' if none."""
    lost = []
    for name, stream in (("standard output", sys.stdout), ("standard error", sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            finish(stream)
        while isinstance(inner := unguarded(stream), _Tee):
            stream = inner.stream
        if isinstance(file := _file(stream), LogFile) and file.error:
            lost.append(f"{name}: {os.strerror(file.error)}")
    return "; ".join(lost)


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Context manager: the output is a command's answer; the command fails if a full disk has dropped some of it.

    A reader that leaves early, as ``head`` does, is no error.

    Raises:
        OSError: standard output could not be written.
    """
    try:
        yield
    except SystemExit:  # argparse, after --help
        _check_taken()
        raise
    _check_taken()


def _check_taken() -> None:
    finish(sys.stdout)
    if isinstance(file := _file(sys.stdout), LogFile) and file.error in (*files.FULL, errno.EFBIG):
        raise OSError(file.error, os.strerror(file.error), "standard output")


def to_log(descriptor: int) -> None:
    """Redirect this process's output to its log, which is open for appending."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(descriptor, number)
        file = io.BufferedWriter(LogFile(number, "ab", closefd=False))
        stream = io.TextIOWrapper(
            file, encoding=getattr(sys, name).encoding, errors="backslashreplace", line_buffering=True
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def log(path: Path, goes_on: bool = False) -> IO[str]:
    """Open the log file of a process's output: a new one, or with ``goes_on`` that of the life before."""
    files.start(path, goes_on)
    return path.open("a", encoding="utf-8", errors="backslashreplace")


def unguarded(stream: Any) -> Any:
    """The stream behind a guard, for code that cleans texts itself before it adds styles and cursor movements."""
    while isinstance(stream, Guard) or hasattr(stream, "rich_proxied_file"):
        stream = stream.stream if isinstance(stream, Guard) else stream.rich_proxied_file
    return stream


class _Tee:
    """A text stream that also writes to a file; if silent, only to the file."""

    def __init__(self, stream: Any, log: Any, silent: bool = False) -> None:
        self.stream = stream
        self.log = log
        self.silent = silent

    def write(self, text: str) -> int:
        self._keep(lambda log: log.write(text))
        return len(text) if self.silent else int(self.stream.write(text))

    def flush(self) -> None:
        self._keep(lambda log: log.flush())
        self.stream.flush()

    def _keep(self, step: Callable[[Any], Any]) -> None:
        """Write to the log until that fails: the printed text may be about that very failure, as of a full disk.

        Several threads print; another one may give up the log while this one writes.
        """
        if (log := self.log) is None:
            return
        try:
            step(log)
        except OSError as error:
            first, self.log = self.log is log, None
            if first:
                self.stream.write(f"{log.name} is not written any more: {error.strerror}\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def teed(log: Any, quiet: bool = False) -> Iterator[None]:
    """Context manager: output goes to the log as well; ``quiet``: to the log only, except stderr."""
    with restored():
        out, error = _Tee(sys.stdout, log, quiet), _Tee(sys.stderr, log)
        stand_in(Guard(out), Guard(error))
        yield
