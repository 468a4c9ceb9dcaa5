"""``tracking.json`` in a run's folder: for each tracker the run's id there, and how many of the points are sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from trainer.checkpoint.durable_folder import sync
from trainer.host import json_text
from trainer.run_folder.json_files import leave
from trainer.run_folder.reset_files import POINTS

FILE = "tracking.json"


@dataclass(frozen=True)
class Position:
    """How far one tracker has come.

    Attributes:
        id: of the run at the service; None: the service has not given one yet.
        sent_bytes: of metrics.jsonl, acknowledged; doubtful_bytes: after these, sent without an answer.
        unsure: the tracker may have points that metrics.jsonl does not have before ``sent_bytes``.
        ahead: of the acknowledged points that were cut off, the updates by name, one for each point.
        error: why points cannot be sent at present; empty as a rule.
    """

    id: str | None = None
    sent_bytes: int = 0
    doubtful_bytes: int = 0
    unsure: bool = False
    ahead: Mapping[str, list[int]] = field(default_factory=dict)
    error: str = ""

    def after_cut(self, lines: bytes, points: int) -> Position:
        """A copy of this position for a metrics.jsonl that will be cut to ``points`` bytes.

        Args:
            lines: metrics.jsonl before; points: bytes of it that stay.
        """
        sent, reached = self.sent_bytes, self.sent_bytes + self.doubtful_bytes
        if reached <= points <= len(lines):
            return self
        if len(lines) < max(reached, points):  # the machine stopped before all was on the disk
            points = min(points, lines.rfind(b"\n") + 1)
        return replace(
            self,
            sent_bytes=min(sent, points),
            doubtful_bytes=max(0, min(reached, points) - sent),
            unsure=True,
            ahead=_together(self.ahead, lines[points:sent]),
        )


def _together(ahead: Mapping[str, list[int]], lines: bytes) -> dict[str, list[int]]:
    """The points ahead, and those of these lines."""
    every = {name: list(steps) for name, steps in ahead.items()}
    for line in lines.splitlines():
        try:
            point = json_text.loads(line)
            for name in point["metrics"]:
                every.setdefault(name, []).append(int(point["step"]))
        except (ValueError, TypeError, KeyError):
            continue
    return every


@dataclass(frozen=True)
class Tracked:
    """The content of ``tracking.json``: the description of the run, and the position of each tracker."""

    run: dict[str, Any]
    trackers: dict[str, Position]


def read(run_dir: Path) -> Tracked | None:
    """Read ``tracking.json`` of a run's folder; None if it was never tracked, or the file cannot be read."""
    try:
        plain = json_text.read_object(run_dir / FILE)
        run, trackers = plain["run"], plain["trackers"]
        if not isinstance(run, dict):
            return None
        return Tracked(run, {str(name): _position(one) for name, one in trackers.items()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _position(plain: Mapping[str, Any]) -> Position:
    known = {one.name: plain[one.name] for one in fields(Position) if one.name in plain}
    found = Position(**known)
    if not all(isinstance(size, int) for size in (found.sent_bytes, found.doubtful_bytes)):
        raise ValueError("no numbers of bytes")
    return found


def write(run_dir: Path, tracked: Tracked) -> None:
    """Write ``tracking.json`` of a run's folder, without secrets."""
    leave(run_dir / FILE, asdict(tracked), private=True)


def position(run_dir: Path, name: str = "mlflow") -> Position:
    """The position of a tracker of the folder's run, such as the id of its MLflow run; the first one without a file."""
    tracked = read(run_dir)
    return tracked.trackers.get(name, Position()) if tracked is not None else Position()


def cut(run_dir: Path, points: int) -> None:
    """Before metrics.jsonl is cut: note in tracking.json which of its points each tracker may have. Can be repeated."""
    tracked = read(run_dir)
    path = run_dir / POINTS
    if tracked is None:
        return
    lines = path.read_bytes() if path.is_file() else b""
    after = {name: position.after_cut(lines, points) for name, position in tracked.trackers.items()}
    write(run_dir, replace(tracked, trackers=after))
    sync(run_dir / FILE)
    sync(run_dir)


def doubt(run_dir: Path, points: int) -> None:
    """Note in a tracking.json from another machine that later points may have been sent.

    Args:
        points: bytes of metrics.jsonl with which the run resumes.
    """
    if (tracked := read(run_dir)) is not None:
        after = {
            name: replace(one, sent_bytes=min(one.sent_bytes, points), doubtful_bytes=0, unsure=True)
            for name, one in tracked.trackers.items()
        }
        write(run_dir, replace(tracked, trackers=after))
