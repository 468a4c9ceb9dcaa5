"""Names the process that failed first, with its own error and its log."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import Died, Missing, NotFinite, RunFailed
from trainer.host.signals import OF_A_GROUP, signal_name

if TYPE_CHECKING:
    from trainer.launch.process import Failure
    from trainer.launch.started_process import StartedProcess

TAIL = 15
"""Lines of a log that a message shows."""
POLL_S = 0.1
"""Longest time between two polls of the processes."""
REASON = 3
"""Lines shown before Python's report of a crash, where C++ names its exception."""


def failed_first(members: Sequence[StartedProcess]) -> RunFailed:
    """Return the error of the process that failed first; the errors of the others are only its echo.

    A killed process reports nothing, but the processes that lost it do, so a signal counts before all errors. Signals
    of a group count last: they reach many processes at once, some of which may report the reason. A process that
    reported no error gets :class:`Died`.
    """
    time.sleep(POLL_S)  # the echo may be here before the cause
    reports: list[tuple[float, str, Path, str]] = []
    failures: dict[str, Failure] = {}
    for member in members:
        handle = member.handle
        handle.poll()
        code = handle.exitcode
        if handle.failure is not None:
            died = str(member) if handle.failure.retryable else ""
            reports.append((handle.failure.at, f"{member}{handle.failure}", handle.log, died))
            failures[reports[-1][1]] = handle.failure
        elif code and code < 0:
            hint = " (out of memory?)" if -code == signal.SIGKILL else ""
            when = float("inf") if -code in OF_A_GROUP else -2
            reports.append(
                (when, f"{member} was killed by {signal_name(-code)}{hint}{_tail(handle.log)}", handle.log, str(member))
            )
        elif code is not None and not handle.well:
            early = "" if code else ", before it had done its work"
            reports.append(
                (-1, f"{member} ended with exit code {code}{early}{_tail(handle.log)}", handle.log, str(member))
            )
    _, text, log, died = min(reports, key=lambda report: report[0])
    message = f"{text}\n  its log: {log}"
    failure = failures.get(text)
    if failure is not None and failure.where is not None:
        return NotFinite(message, *failure.where)
    if failure is not None and failure.missing:
        return Missing(message, failure.missing)
    return Died(message, died) if died else RunFailed(message)


def _tail(log: Path) -> str:
    """The last lines of a log; for a crash in compiled code its reason, and the innermost calls of the thread."""
    try:
        said = log.read_text(errors="replace").rstrip().splitlines()
    except OSError:
        return ""
    last = said[-TAIL:]
    if crashed := [number for number, line in enumerate(said) if line.startswith("Fatal Python error")]:
        after = said[crashed[-1] + 1 :]
        frames = next((number for number, line in enumerate(after) if line.startswith("Current thread")), 0)
        last = [*said[max(0, crashed[-1] - REASON) : crashed[-1] + 1], *after[frames : frames + TAIL]]
    return "\n  " + "\n  ".join(last) if last else ""
