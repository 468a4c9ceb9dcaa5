"""Files of one line for each point, such as metrics.jsonl; on a full disk, lines wait in memory until there is room."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.errors import why
from trainer.host import json_text
from trainer.host.files import REFUSED


class Points:
    """Appends lines to a run's metrics.jsonl, or to another file; can be used from any thread.

    Args:
        run_dir: the run's folder.

    Attributes:
        last_step: step of the last point in the file when it was opened; 0: there was none.
    """

    def __init__(self, run_dir: Path, name: str = "metrics.jsonl") -> None:
        self.path = run_dir / name
        _end_at_a_line(self.path)
        self.last_step = last_step(self.path)
        self.file = self.path.open("ab", buffering=0)
        self.waiting = b""
        self.refused = False
        self.lock = threading.Lock()

    def add(self, line: str) -> None:
        """Append a line, after the waiting ones."""
        with self.lock:
            self.waiting += line.encode() + b"\n"
            self._write()

    @property
    def size(self) -> int:
        """The bytes of all lines so far, including waiting ones."""
        with self.lock:
            return self.file.tell() + len(self.waiting)

    def unwritten(self) -> str:
        """Write waiting lines; returns why some still wait, or ''."""
        with self.lock:
            error = self._write()
            return f"{self.path}: {why(error)}" if error else ""

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: some lines cannot be written.
        """
        with self.lock:
            error = self._write()
            self.file.close()
            if error is not None:
                raise OSError(error.errno, error.strerror, str(self.path)) from error

    def _write(self) -> OSError | None:
        """Write waiting lines; returns the error of a full disk, which is printed once."""
        try:
            while self.waiting:
                self.waiting = self.waiting[self.file.write(self.waiting) :]
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            if not self.refused:
                print(
                    (
                        f"ATTENTION: {self.path} cannot be written ({why(error)}); the training goes on, its "
                        f"points wait until there is room"
                    ),
                    flush=True,
                )
            self.refused = True
            return error
        if self.refused:
            print(f"{self.path} is written again; no point is missing", flush=True)
        self.refused = False
        return None


def _end_at_a_line(path: Path) -> None:
    """Cut off a partial last line, as a full disk leaves it."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)


def last_step(path: Path) -> int:
    """The update of the last whole line of a file of points; 0: there is none."""
    try:
        lines = path.read_bytes().rpartition(b"\n")[0]
        return int(json_text.loads(lines.rpartition(b"\n")[2]).get("step"))
    except (OSError, ValueError, TypeError, AttributeError):  # no file, no line, or an unknown one
        return 0


def read_points(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the points of a run's metrics.jsonl, also while it is written; none if there is no file."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            yield json_text.loads(line)
        except ValueError:  # a writer that was killed leaves half a line
            continue
