"""Follows one run's metrics.jsonl into one tracker: every point once, whatever fails and whoever is killed.

The position in ``tracking.json`` has three states:

- at rest: ``sent_bytes`` of metrics.jsonl are acknowledged, and ``doubtful_bytes`` is 0;
- sending: before :meth:`Tracker.log` is called, ``doubtful_bytes`` is set to the batch's size; when it returns, these
  bytes are acknowledged;
- in doubt: ``log`` raised, or this process was killed in it.

metrics.jsonl itself is cut when a run goes back to a checkpoint, and the points that were cut off are written again.
After a doubt or a cut the position is ``unsure``: the tracker is asked what it has (:meth:`Tracker.sent`), and only
the other points are sent. A tracker that cannot be asked is spared the points that it has acknowledged (``ahead``).
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trainer.config import redact
from trainer.errors import first_line
from trainer.run_folder import tracking_file
from trainer.run_folder.tracking_file import Position, Tracked
from trainer.tracking.contract import Point, TrackedRun, Tracker
from trainer.tracking.points import Ahead, Asked, batches, passed, points_of

BATCH = 1000
LONGEST_PAUSE_S = 30.0
UNREACHED = re.compile(
    r"API request to https?://(?:[^/\s@]*@)?([^/\s]+)|HTTPS?ConnectionPool\(host='([^']+)', port=(\d+)\)"
)
NO_ANSWER = re.compile(r"\[Errno -?\d+\] ([^'\")\]]+)|((?:read |connect(?:ion)? )?timed out)", re.IGNORECASE)


class Notes:
    """``tracking.json`` of one run, which the threads of all its trackers write.

    Args:
        say: shows a line to the user.
    """

    def __init__(self, run: TrackedRun, positions: dict[str, Position], say: Callable[[str], None]) -> None:
        self.run_dir, self.say = Path(run.folder), say
        self.tracked = Tracked(asdict(replace(run, before={})), positions)
        self.lock, self.failed = threading.Lock(), False

    def note(self, name: str, position: Position) -> None:
        """Write the file with this position of a tracker."""
        with self.lock:
            self.tracked.trackers[name] = position
            self.write()

    def write(self) -> None:
        """Write the file. A full disk does not keep points from being sent."""
        try:
            if self.run_dir.is_dir():
                tracking_file.write(self.run_dir, self.tracked)
        except OSError as error:
            if not self.failed:
                self.say(
                    f"{error.filename or self.run_dir / tracking_file.FILE} cannot be written ({error.strerror}): "
                    f"should this run be killed, nobody knows how far it was sent"
                )
            self.failed = True


class Follower:
    """Follows a run's metrics.jsonl into one tracker; every step can be retried.

    Args:
        parent: the follower of the sweep that the run belongs to, of the same tracker.
        away: why the service did not answer before the start, which the user knows already.
    """

    def __init__(
        self, name: str, tracker: Tracker, run: TrackedRun, notes: Notes, parent: Follower | None = None, away: str = ""
    ) -> None:
        self.name, self.tracker, self.run, self.notes, self.parent = name, tracker, run, notes, parent
        self.position = replace(notes.tracked.trackers.get(name, Position()), error=away)
        self.started = False
        self.pause = self.retry_at = 0.0
        self.asked: Asked | None = None
        self.ended: dict[str, Any] = {}

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return Path(self.run.folder)

    def say(self, line: str) -> None:
        """Show a line to the user, with the tracker's name before it."""
        self.notes.say(f"{self.tracker.title or self.name}: {line}")

    def try_once(self) -> None:
        """Open the run if need be, and send what is new. After an error the pause before the next try doubles."""
        if time.monotonic() < self.retry_at:
            return
        try:
            self._start()
            self._send_points()
        except Exception as error:  # whatever a tracker raises for a service that is away or in trouble
            self._fail(error)
            return
        if self.position.error:
            self.say("all points so far are sent")
            self._move(error="")
        self.pause = 0.0

    def _fail(self, error: Exception) -> None:
        new = not self.position.error
        self._move(error=said(error))
        self.asked = None
        self.pause = min(LONGEST_PAUSE_S, max(1.0, self.pause * 2))
        self.retry_at = time.monotonic() + self.pause
        if new:
            self.say(
                f"{self.tracker.trouble} ({self.position.error}); training goes on, points are kept in "
                f"{self.run_dir / 'metrics.jsonl'} and sent later"
            )

    def _start(self) -> None:
        if self.started:
            return
        if self.parent is not None and self.parent.position.id is None:
            self.parent.try_once()
        parent_id = self.parent.position.id if self.parent is not None else None
        found = self.tracker.start(replace(self.run, parent_id=parent_id), self.position.id)
        if found != self.position.id:
            self._move(id=found, sent_bytes=0, doubtful_bytes=0, unsure=False, ahead={})
        self.started = True

    def _move(self, **changes: Any) -> None:
        self.position = replace(self.position, **changes)
        self.notes.note(self.name, self.position)

    def _new_lines(self) -> bytes:
        try:
            with (self.run_dir / "metrics.jsonl").open("rb") as points:
                points.seek(self.position.sent_bytes)
                new = points.read()
        except OSError:  # not there yet, or the folder is gone
            return b""
        return new[: new.rfind(b"\n") + 1]

    def _send_points(self) -> None:
        new = self._new_lines()
        if self.position.doubtful_bytes:
            self._move(doubtful_bytes=0, unsure=True)
        for points, size in batches(new, BATCH):
            missing, ahead = self._missing(points)
            self._move(doubtful_bytes=size)
            if missing:
                self.tracker.log(missing)
            self._move(sent_bytes=self.position.sent_bytes + size, doubtful_bytes=0, ahead=ahead)

    def _missing(self, points: list[Point]) -> tuple[list[Point], dict[str, list[int]]]:
        """The points that the tracker does not have, and ``ahead`` when it has these."""
        if type(self.tracker).sent is not Tracker.sent:
            return [point for point in points if not self._has(point)] if self.position.unsure else points, {}
        ahead: Ahead = Counter((name, step) for name, steps in self.position.ahead.items() for step in steps)
        missing = [point for point in points if not passed(ahead, point)]
        left: dict[str, list[int]] = {}
        for name, step in ahead.elements():
            left.setdefault(name, []).append(step)
        return missing, left

    def _has(self, point: Point) -> bool:
        if self.asked is None:
            with (self.run_dir / "metrics.jsonl").open("rb") as points:
                before = points_of(points.read(self.position.sent_bytes).splitlines())
            self.asked = Asked(before, self.tracker.sent)
        return self.asked.has(point)

    def go_back(self, points: int, cut: str) -> None:
        """Note that metrics.jsonl was cut to ``points`` bytes, and that ``cut`` will be written again."""
        self.asked = None
        self.position = self.position.after_cut(bytes(points) + cut.encode(), points)
        self.notes.note(self.name, self.position)

    def finish(self, status: str, tags: dict[str, str], timeout_s: float) -> dict[str, Any]:
        """Send the rest of the points, the artifacts and the end of the run, within ``timeout_s``."""
        until = time.monotonic() + timeout_s
        done = False
        while not done:
            self.try_once()
            if not self.position.error:
                done = self._end(status, tags)
            if not done:
                if time.monotonic() > until:
                    break
                time.sleep(min(0.2, max(0.0, until - time.monotonic())) or 0.01)
        try:
            self.tracker.close()
        except Exception as error:
            self.say(f"could not be closed ({said(error)})")
        return {
            "closed": self.run.folder,
            "tracker": self.name,
            "id": self.position.id,
            "where": self.tracker.where(),
            "group": self.tracker.group,
            "unsent": self._new_lines().count(b"\n"),
            "error": "" if done else self.ended.get("error") or self.position.error,
        }

    def _end(self, status: str, tags: dict[str, str]) -> bool:
        try:
            for name in self.run.artifacts:
                for path in sorted(self.run_dir.glob(name)):
                    self.tracker.artifact(path)
            self.tracker.finish(status, tags)
        except Exception as error:  # as in try_once
            self.ended = {"error": said(error)}
            return False
        return True


def said(error: Exception) -> str:
    """An exception as one line; of a server that is not reached, which one and why."""
    whole = str(error)
    if (server := UNREACHED.search(whole)) and (why := NO_ANSWER.search(whole)):
        address = server[1] or f"{server[2]}:{server[3]}"
        return redact.text(f"{address}: {(why[1] or why[2]).strip().rstrip('.').lower()}")
    return redact.text(first_line(error)[:300])
