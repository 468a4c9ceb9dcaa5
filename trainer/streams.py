"""What a process prints: every text on its way to the screen or a log is cleaned of secrets and control characters."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from trainer import confidential
from trainer.confidential import HERE
from trainer.host import private
from trainer.visible import visible


def clean(text: str) -> str:
    """A text as it may be seen: no secret that this process knows of, no control character."""
    return visible(confidential.text(text))


class Guard:
    """A text stream that cleans what is written to it, line by line; a lone carriage return ends a line as well.

    Whoever prints (this package, a user's own class, a traceback, a library) need not think of it.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._pending = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        """Lines go on at once, the rest when it is complete or the stream is flushed."""
        with self._lock:
            lines, newline, self._pending = (self._pending + text).rpartition("\n")
            if newline:
                self._emit(lines + newline)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """As of any text stream."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """What is there goes on, complete or not."""
        with self._lock:
            pending, self._pending = self._pending, ""
            if pending:
                self._emit(pending)
        self.stream.flush()

    def _emit(self, text: str) -> None:
        text = clean(text.replace("\r\n", "\n").replace("\r", "\n"))
        try:
            self.stream.write(text)
        except UnicodeEncodeError:
            encoding = getattr(self.stream, "encoding", None) or "ascii"
            self.stream.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Guard the standard streams; what is learnt inside of secrets is forgotten at the end."""
    before = sys.stdout, sys.stderr
    with HERE.for_now():
        guard()
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):  # nobody may be there to read it
                    stream.flush()
            sys.stdout, sys.stderr = before


def guard() -> None:
    """Guard the standard streams of this process from here on."""
    sys.stdout, sys.stderr = (s if isinstance(s, Guard) else Guard(s) for s in (sys.stdout, sys.stderr))


def confide(payload: Any) -> None:
    """In a started process: what it prints is guarded, and it knows what its launcher knows."""
    if isinstance(payload, Mapping):
        HERE.learn(payload.get("secrets", ()), confidential.values(payload.get("config", {})))
    guard()


def log(path: Path) -> IO[str]:
    """A new file for what a process prints."""
    private.start_empty(path)
    return path.open("a", encoding="utf-8", errors="backslashreplace")


def unguarded(stream: Any) -> Any:
    """The stream behind the guard: for who cleans texts before they get styles and cursor movements."""
    while isinstance(stream, Guard) or hasattr(stream, "rich_proxied_file"):
        stream = stream.stream if isinstance(stream, Guard) else stream.rich_proxied_file
    return stream
