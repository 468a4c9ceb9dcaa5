"""``tracking.json`` in a run's folder: for each tracker the run's id there, and how many of the points are sent."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.host import json_text
from trainer.run_folder.json_files import leave
from trainer.run_folder.reset_files import POINTS

FILE = "tracking.json"


@dataclass(frozen=True)
class Position:
    """How far one tracker has come.

    Attributes:
        id: of the run at the service; None: the service has not given one yet.
        sent_bytes: of metrics.jsonl, acknowledged by the service.
        error: why points cannot be sent at present; empty as a rule.
    """

    id: str | None = None
    sent_bytes: int = 0
    error: str = ""


@dataclass(frozen=True)
class Tracked:
    """The content of ``tracking.json``: the description of the run, and the position of each tracker."""

    run: dict[str, Any]
    trackers: dict[str, Position]


def read(run_dir: Path) -> Tracked | None:
    """Read ``tracking.json`` of a run's folder; None if it was never tracked, or the file cannot be read.

    Of a run that has gone back to a checkpoint, metrics.jsonl may be shorter than what was sent.
    """
    try:
        plain = json_text.read_object(run_dir / FILE)
        run, trackers = plain["run"], plain["trackers"]
        if not isinstance(run, dict):
            return None
        size = (run_dir / POINTS).stat().st_size if (run_dir / POINTS).is_file() else 0
        return Tracked(
            run,
            {
                name: Position(one["id"], min(int(one["sent_bytes"]), size), one["error"])
                for name, one in trackers.items()
            },
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write(run_dir: Path, tracked: Tracked) -> None:
    """Write ``tracking.json`` of a run's folder, without secrets."""
    leave(run_dir / FILE, asdict(tracked), private=True)


def position(run_dir: Path, name: str = "mlflow") -> Position:
    """The position of a tracker of the folder's run, such as the id of its MLflow run; the first one without a file."""
    tracked = read(run_dir)
    return tracked.trackers.get(name, Position()) if tracked is not None else Position()
