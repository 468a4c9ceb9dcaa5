"""A run's processes are started again from the newest checkpoint when one of them has died."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint import store
from trainer.config.redact import text
from trainer.errors import Died, RunFailed, first_line
from trainer.planning.assignment import Assignment
from trainer.planning.resume import CHECKPOINTS
from trainer.run_folder import lives
from trainer.run_folder.again import POINTS, go_back
from trainer.wording import counted

if TYPE_CHECKING:
    from trainer.job.ready import Ready
    from trainer.job.result import Result
    from trainer.tracking.client import Tracker

WINDOW_S = 3600.0
"""So many restarts as ``launch.max_restarts`` may be within this time."""


def start_and_restart(
    start: Callable[[Assignment], dict[str, Any]],
    ready: Ready,
    result: Result,
    tracker: Tracker | None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """What the first worker returned in the last life of the run's processes; ``result`` counts the restarts.

    Raises:
        RunFailed: a process has died too often, or twice after the same update; or the run failed otherwise.
    """
    assignment, times = ready.assignment, deque[float]()
    before: Died | None = None
    while True:
        try:
            return start(assignment)
        except Died as death:
            most = ready.plan.restarts
            if not most:
                raise
            while times and clock() - times[0] > WINDOW_S:
                times.popleft()
            if before is not None and (death.who, death.update) == (before.who, before.update):
                why = f"{death.who} died after update {death.update} twice in a row: the run is not started again"
                raise RunFailed(f"{death}\n{why}") from death
            if len(times) >= most:
                often = f"{counted(most, 'restart')} within an hour (launch.max_restarts): the run is not started again"
                raise RunFailed(f"{death}\nafter {often}") from death
            times.append(clock())
            before = death
            result.restarts += 1
            assignment = _again(ready, death, f"restart {len(times)} of {most}", tracker)


def _again(ready: Ready, death: Died, which: str, tracker: Tracker | None) -> Assignment:
    """What the processes of the next life are handed; the run's folder is as it was at the checkpoint."""
    from trainer.job.plan_table import console

    run_dir, out = Path(ready.plan.run_dir), console()

    def say(line: str) -> None:
        out.print(line, soft_wrap=True)

    say(f"\nATTENTION: {death}")
    folder = store.newest_whole(run_dir / CHECKPOINTS, say)
    store.forget_unfinished(run_dir / CHECKPOINTS)
    about = store.about(folder) if folder is not None else ready.resume.about if ready.resume is not None else None
    where = f"from {folder.name}" if folder is not None else "from the beginning: there is no checkpoint yet"
    _forget_since(run_dir, about.points if about is not None else 0, tracker, say)
    lives.end(run_dir, "failed", death.update, text(first_line(death), ready.secrets))
    before = lives.read(run_dir)
    command = before[-1].command if before else ""
    lives.begin(run_dir, before, about.step if about is not None else 0, ready.plan.workers, command)
    say(f"{which}: all processes are started again, {where}\n")
    again = replace(ready.assignment, again=True)
    return again if folder is None else replace(again, resume=str(folder))


def _forget_since(run_dir: Path, points: int, tracker: Tracker | None, say: Callable[[str], None]) -> None:
    """Cut metrics.jsonl to so many bytes, and tell who sends its points."""
    path = run_dir / POINTS
    cut = path.read_bytes()[points:] if path.is_file() else b""
    go_back(run_dir, points, say)
    if tracker is not None:
        tracker.go_back(run_dir, points, cut.decode(errors="replace"))
