"""``tracking.json`` in a run's folder: which MLflow run it is, and how many of its points are sent."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from trainer.checkpoint.durable_folder import sync
from trainer.host import json_text
from trainer.run_folder.json_files import leave
from trainer.run_folder.reset_files import POINTS

FILE = "tracking.json"
NO_END = 1 << 62


@dataclass(frozen=True)
class Remembered:
    """The content of ``tracking.json``: what the next recorder process must know.

    Attributes:
        uri: without who logs in; experiment: its name; run_id: None before the server has given one.
        sent_bytes: of metrics.jsonl, acknowledged; doubtful_bytes: after these, sent without an answer.
        asked: the server was asked to open the run.
        again: first and last update of points that may be sent and were cut off metrics.jsonl, to be written again.
        run: the message that opened the run.
    """

    uri: str
    experiment: str
    run_id: str | None
    sent_bytes: int = 0
    doubtful_bytes: int = 0
    asked: bool = False
    again: tuple[int, int] | None = None
    run: dict[str, Any] = field(default_factory=dict)

    def after_cut(self, lines: bytes, points: int) -> Remembered:
        """A copy of this record for a metrics.jsonl that will be cut to ``points`` bytes.

        Args:
            lines: metrics.jsonl before; points: bytes of it that stay.
        """
        sent, reached = self.sent_bytes, self.sent_bytes + self.doubtful_bytes
        if reached <= points <= len(lines):
            return self
        if len(lines) < max(reached, points):  # the machine stopped before all was on the disk
            again = (0, NO_END)
            points = min(points, lines.rfind(b"\n") + 1)
        else:
            again = _updates(lines[points:reached])
        if self.again is not None:
            again = (min(again[0], self.again[0]), max(again[1], self.again[1]))
        return replace(
            self, sent_bytes=min(sent, points), doubtful_bytes=max(0, min(reached, points) - sent), again=again
        )


def _updates(lines: bytes) -> tuple[int, int]:
    """First and last update of these points; of lines that cannot be read, any may be."""
    try:
        steps = [int(json_text.loads(line).get("step")) for line in lines.splitlines()]
    except (ValueError, TypeError, AttributeError):
        return (0, NO_END)
    return (min(steps), max(steps))


def read(run_dir: Path) -> Remembered | None:
    """Read ``tracking.json`` of a run's folder; None if it was never tracked, or the file cannot be read."""
    try:
        parsed = json_text.read_object(run_dir / FILE)
        known = {one.name: parsed[one.name] for one in fields(Remembered) if one.name in parsed}
        if known.get("again") is not None:
            known |= {"again": tuple(known.pop("again"))}
        found = Remembered(**known)
        numbers = (found.sent_bytes, found.doubtful_bytes)
        whole = isinstance(found.uri, str) and isinstance(found.run, dict) and all(isinstance(n, int) for n in numbers)
        return found if whole else None
    except (OSError, ValueError, TypeError):
        return None


def write(run_dir: Path, record: Remembered) -> None:
    """Write ``tracking.json`` of a run's folder, without secrets."""
    leave(run_dir / FILE, asdict(record), private=True)


def cut(run_dir: Path, points: int) -> None:
    """Before metrics.jsonl is cut: note in tracking.json which of its points the server may have. Can be repeated."""
    record = read(run_dir)
    path = run_dir / POINTS
    if record is None:
        return
    write(run_dir, record.after_cut(path.read_bytes() if path.is_file() else b"", points))
    sync(run_dir / FILE)
    sync(run_dir)


def doubt(run_dir: Path, points: int) -> None:
    """Note in a tracking.json from another machine that it is unknown what was sent after it was written.

    Args:
        points: bytes of metrics.jsonl with which the run goes on.
    """
    if (record := read(run_dir)) is not None:
        write(run_dir, replace(record, sent_bytes=min(record.sent_bytes, points), doubtful_bytes=0, again=(0, NO_END)))
