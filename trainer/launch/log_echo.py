"""Shows on the screen what a process writes into its log."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

POLL_S = 0.1


class LogEcho:
    """Prints the lines of a log on the screen as they appear, from now until :meth:`end`.

    Args:
        who: prefix of each line.
        since: bytes of the log that are skipped.
        only: show only lines that begin with this.
    """

    def __init__(self, log: Path, who: str = "", since: int = 0, only: str = "") -> None:
        self.who, self.only = who, only
        self.log = log.open(errors="replace")
        self.log.seek(since)
        self.rest = ""
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._follow, daemon=True, name="screen")
        self.thread.start()

    def end(self) -> None:
        """Print the rest of the log, and stop."""
        self.ended.set()
        self.thread.join()
        self.log.close()

    def _follow(self) -> None:
        try:
            while not self.ended.wait(POLL_S):
                self._show()
            self._show()
            self._write(self.rest)
        except (OSError, ValueError):  # the screen is closed
            return

    def _show(self) -> None:
        text = self.rest + self.log.read()
        lines, newline, self.rest = text.rpartition("\n")
        self._write(lines + newline)

    def _write(self, text: str) -> None:
        if text:
            lines = text.splitlines(keepends=True) if self.who or self.only else [text]
            sys.stdout.write("".join(f"{self.who}{line}" for line in lines if line.startswith(self.only)))
            sys.stdout.flush()
