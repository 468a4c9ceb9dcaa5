"""Continues the tracking of a run that resumes in its folder, or in a copy of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trainer.run_folder import tracking_file
from trainer.run_folder.tracking_file import Position, Tracked
from trainer.tracking.contract import TrackedRun


def goes_on(run: TrackedRun, say: Callable[[str], None]) -> tuple[TrackedRun, dict[str, Position]]:
    """The description of a run as its trackers get it, with how far each tracker has come; {} where the run is new.

    Args:
        say: shows a line to the user.
    """
    before = tracking_file.read(Path(run.folder)) if run.resumed else None
    if before is None:
        return replace(run, resumed=False), {}
    if (other := _copied_from(run, before)) is not None:
        ids = {name: position.id or str(other) for name, position in sorted(before.trackers.items())}
        has = f", which has {', '.join(f'the {name} run {one}' for name, one in ids.items())}" if ids else ""
        say(f"{run.folder} is a copy of {other}{has}; this folder gets runs of its own, with all points")
        return replace(run, copied=ids), {}
    first = TrackedRun.of({**before.run, "before": {}})
    same = replace(run, opened=first.opened, start_time=first.start_time, before=before.run)
    return same, before.trackers


def _copied_from(run: TrackedRun, before: Tracked) -> Path | None:
    """The folder of which this one is a copy; None: it is no copy. Both would write into the same runs."""
    origin = Path(str(before.run.get("folder", run.folder)))
    other = tracking_file.read(origin)
    if other is None or other.run.get("opened") != before.run.get("opened") or origin.samefile(run.folder):
        return None
    return origin
