"""Follows one run's metrics.jsonl into one tracker: every point once, whatever fails and whoever is killed.

A follower is in one of two states:

- sure: the run is new, and each batch of points so far was acknowledged (:meth:`Tracker.log` returned). The next points
  are sent as they are.
- unsure: the run is resumed, metrics.jsonl was cut, something failed, or an earlier recorder was killed. Then
  metrics.jsonl is read from its beginning. The tracker is asked which points it has, and only the others are sent.

From unsure no way leads back: the tracker may have points that were cut off, and that training writes again later.

A tracker without :meth:`Tracker.sent` cannot be asked. For these, ``sent.jsonl`` has the points that were acknowledged:
a line for each batch.
"""

from __future__ import annotations

import contextlib
import json
import math
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
from trainer.host import files, json_text
from trainer.run_folder import tracking_file
from trainer.run_folder.folder_lock import FolderLock
from trainer.run_folder.points import Points
from trainer.run_folder.reset_files import POINTS, SENT
from trainer.run_folder.tracking_file import Position, Tracked
from trainer.tracking.contract import STILL_RUNNING, Point, TrackedRun, Tracker

BATCH = 1000
"""Most points in one call of a tracker."""
AT_ONCE = 1 << 17
"""Bytes of metrics.jsonl that are read at once."""
REFUSED_S = 10.0
"""How long connections may have been refused when the end of a run waits no longer: nothing listens there."""
LONGEST_PAUSE_S = 2.0
"""Longest pause between two attempts to send points to a tracker, or to end a run in it."""
LEAST_END_S = 3.0
"""Shortest wait at the end of a run for a service that refuses connections."""
UNREACHED = re.compile(
    r"API request to https?://(?:[^/\s@]*@)?([^/\s]+)|HTTPS?ConnectionPool\(host='([^']+)', port=(\d+)\)"
)
NO_ANSWER = re.compile(r"\[Errno -?\d+\] ([^'\")\]]+)|((?:read |connect(?:ion)? )?timed out)", re.IGNORECASE)


class OpenRun:
    """A run that is open: its description, its ``tracking.json``, and the lock on its folder.

    The threads of all its trackers share it.

    Args:
        positions: how far each tracker has come, those of earlier lives as well.
        say: shows a line to the user.
        hold: the lock, which the last tracker releases; None: the caller holds it.
    """

    def __init__(
        self,
        run: TrackedRun,
        positions: dict[str, Position],
        say: Callable[[str], None],
        hold: FolderLock | None = None,
    ) -> None:
        self.run, self.say, self.hold = run, say, hold
        self.folder = Path(run.folder)
        self.tracked = Tracked(asdict(replace(run, before={})), positions)
        self.open_trackers, self.lock = set(run.trackers), threading.Lock()
        self._write()

    def note(self, name: str, position: Position) -> None:
        """Note how far a tracker has come."""
        with self.lock:
            self.tracked.trackers[name] = position
            self._write()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # a full disk does not keep points from being sent
            if self.folder.is_dir():
                tracking_file.write(self.folder, self.tracked)

    def done(self, name: str) -> None:
        """Note that a tracker has ended this run; the last one releases the folder."""
        with self.lock:
            self.open_trackers.discard(name)
            if not self.open_trackers and self.hold is not None:
                self.hold.leave()
                self.hold = None


class Ledger:
    """``sent.jsonl``: which points a tracker that cannot be asked has acknowledged; a line for each batch.

    Args:
        to: the tracker, the run, and its id at the service. A copy of the folder is another run.
    """

    def __init__(self, folder: Path, to: list[str]) -> None:
        files.go_on(folder / SENT)
        self.file, self.to = Points(folder, SENT), to

    def add(self, points: list[Point]) -> None:
        """Note acknowledged points."""
        self.file.add(json.dumps({"to": self.to, "points": [(point.name, point.step) for point in points]}))

    def read(self) -> dict[str, Counter[int]]:
        """Count the acknowledged points, by name and update."""
        there: dict[str, Counter[int]] = {}
        for line in (self.file.path.read_bytes() + self.file.waiting).splitlines():
            batch = json_text.loads(line)
            for name, step in batch["points"] if batch["to"] == self.to else ():
                there.setdefault(name, Counter())[step] += 1
        return there


class Follower:
    """Follows a run's metrics.jsonl into one tracker; every step can be retried.

    Args:
        parent: the follower of the sweep that the run belongs to, of the same tracker.
        away: why the service did not answer before the start, which the user knows already.
    """

    def __init__(
        self, name: str, tracker: Tracker, opened: OpenRun, parent: Follower | None = None, away: str = ""
    ) -> None:
        self.name, self.tracker, self.opened, self.parent = name, tracker, opened, parent
        self.run, self.points = opened.run, opened.folder / POINTS
        self.position = replace(opened.tracked.trackers.get(name, Position()), error=away)
        self.started = False
        self.pause = self.retry_at = 0.0
        self.refused_since = math.inf  # when the first connection was refused since the last other answer
        self.read_bytes, self.unsure = 0, opened.run.resumed
        self.there: dict[str, Counter[int]] | None = None
        self.ledger: Ledger | None = None
        tracker.say = self.say

    def say(self, line: str) -> None:
        """Show a line to the user, with the tracker's name before it."""
        self.opened.say(f"{self.tracker.title or self.name}: {line}")

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
            self.refused_since = math.inf
            self.say("all points so far are sent")
            self._move(error="")
        self.pause = 0.0

    def _fail(self, error: Exception) -> None:
        new = not self.position.error
        self._note_refusal(error)
        self._move(error=said(error))
        self.compare_again()
        self.pause = min(LONGEST_PAUSE_S, max(1.0, self.pause * 2))
        self.retry_at = time.monotonic() + self.pause
        if new:
            self.say(
                f"{self.tracker.trouble} ({self.position.error}); training goes on, points are kept in "
                f"{self.points} and sent later"
            )

    def _note_refusal(self, error: Exception) -> None:
        self.refused_since = min(self.refused_since, time.monotonic()) if is_refused(error) else math.inf

    def _start(self) -> None:
        if self.started:
            return
        if self.parent is not None and self.parent.position.id is None:
            self.parent.try_once()
        parent_id = self.parent.position.id if self.parent is not None else None
        if self.parent is None and self.run.parent is not None:  # another command, on another host, has the sweep
            parent_id = tracking_file.position(Path(self.run.parent), self.name).id
        found = self.tracker.start(replace(self.run, parent_id=parent_id), self.position.id)
        if found != self.position.id:
            self._move(id=found, sent_bytes=0)
        if type(self.tracker).sent is Tracker.sent:
            self.ledger = Ledger(self.opened.folder, [self.name, self.run.opened, found])
        self.started = True

    def _move(self, **changes: Any) -> None:
        self.position = replace(self.position, **changes)
        self.opened.note(self.name, self.position)

    def _lines(self, place: int, size: int = -1) -> list[bytes]:
        """Whole lines of metrics.jsonl from a place on, of about ``size`` bytes."""
        try:
            with self.points.open("rb") as file:
                file.seek(place)
                lines = file.readlines(size)
        except OSError:  # not there yet, or the folder is gone
            return []
        return lines if not lines or lines[-1].endswith(b"\n") else lines[:-1]

    def _send_points(self) -> None:
        while lines := self._lines(self.read_bytes, AT_ONCE):
            points = [
                Point(name, value, line["step"], line["time"])
                for line in map(json_text.loads, lines)
                for name, value in line["metrics"].items()
            ]
            missing = [point for point in points if not self._has(point)] if self.unsure else points
            for start in range(0, len(missing), BATCH):
                batch = missing[start : start + BATCH]
                self.tracker.log(batch)
                self.refused_since = math.inf
                if self.ledger is not None:
                    self.ledger.add(batch)
            self.read_bytes += sum(map(len, lines))
            if self.read_bytes > self.position.sent_bytes:
                self._move(sent_bytes=self.read_bytes)

    def _has(self, point: Point) -> bool:
        """Whether the tracker has this point; each of its points counts once."""
        if self.there is None:
            self.there = self.ledger.read() if self.ledger is not None else {}
        if point.name not in self.there:
            sent = self.tracker.sent(point.name) if self.ledger is None else ()
            self.there[point.name] = Counter(map(int, sent))
        left = self.there[point.name]
        found = left[point.step] > 0
        left[point.step] -= found
        return found

    def compare_again(self) -> None:
        """Compare all points with those that the tracker has, before more are sent."""
        self.unsure, self.there, self.read_bytes = True, None, 0

    def go_back(self, points: int) -> None:
        """Note that metrics.jsonl was cut to ``points`` bytes."""
        self.compare_again()
        self._move(sent_bytes=min(self.position.sent_bytes, points))

    def finish(self, status: str, tags: dict[str, str], timeout_s: float) -> dict[str, Any]:
        """Send the rest of the points, the artifacts and the end of the run, within ``timeout_s``.

        It is given up sooner where connections are refused, and have been for ``REFUSED_S``.
        """
        began = time.monotonic()
        self.pause = self.retry_at = 0.0
        pause = 0.2  # the end sends files again, each time
        while True:
            self.try_once()
            error = self.position.error or self._end(status, tags)
            until = min(began + timeout_s, max(began + LEAST_END_S, self.refused_since + REFUSED_S))
            if not error or (left := until - time.monotonic()) <= 0:
                break
            self.retry_at = min(self.retry_at, until)
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE_S)
        closing = [self.tracker.close, *([self.ledger.file.close] if self.ledger is not None else [])]
        for close in closing:
            try:
                close()
            except Exception as problem:
                self.say(f"could not be closed ({said(problem)})")
        return {
            "closed": self.run.folder,
            "tracker": self.name,
            "id": self.position.id,
            "where": self.tracker.where(),
            "group": self.tracker.group,
            "unsent": len(self._lines(self.position.sent_bytes)),
            "error": error,
        }

    def _end(self, status: str, tags: dict[str, str]) -> str:
        """Send the artifacts and the end of the run; returns why that failed, or ''."""
        try:
            for name in self.run.artifacts:
                for path in sorted(self.opened.folder.glob(name)):
                    self.tracker.artifact(path)
            if status == STILL_RUNNING:
                self.tracker.leave_open(tags)
            else:
                self.tracker.finish(status, tags)
        except Exception as error:  # as in try_once
            self._note_refusal(error)
            return said(error)
        return ""


def is_refused(error: BaseException | None) -> bool:
    """Whether an exception, or one of its causes, says that nothing listens at the address."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError) or "connection refused" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


def said(error: Exception) -> str:
    """An exception as one line; of a server that is not reached, which one and why."""
    whole = str(error)
    if (server := UNREACHED.search(whole)) and (why := NO_ANSWER.search(whole)):
        address = server[1] or f"{server[2]}:{server[3]}"
        return redact.text(f"{address}: {(why[1] or why[2]).strip().rstrip('.').lower()}")
    return redact.text(first_line(error)[:300])
