"""Resets a run's files to a checkpoint, so that updates that are trained again are recorded once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from trainer.host.files import replacing, start_empty
from trainer.run_folder.json_files import leave
from trainer.terminal.status import read_status

POINTS = "metrics.jsonl"
SENT = "sent.jsonl"
"""Points that trackers which cannot be asked have acknowledged."""
REPORT = "nonfinite.json"
"""A worker's report about numbers that are not finite."""
OF_BEST = {"best", "bests"}
"""Keys of status.json that may come from validations after the checkpoint."""
CARRIED = (
    POINTS,
    "lives.json",
    "status.json",
    "tracking.json",
    SENT,
    "classes.json",
    "validation.best.npz",
    "checkpoints/best.safetensors",
)
"""Files of a run's folder that another machine needs, besides a checkpoint, to resume the run."""


def reset_to_checkpoint(run_dir: Path, points: int, say: Callable[[str], None]) -> None:
    """Cut metrics.jsonl to its size at the checkpoint, and remove the result of the earlier life.

    Args:
        points: bytes that stay.
        say: called with a warning if the file is shorter.
    """
    path = run_dir / POINTS
    (run_dir / "result.json").unlink(missing_ok=True)
    (run_dir / REPORT).unlink(missing_ok=True)
    if (status := read_status(run_dir)).keys() & OF_BEST:
        leave(run_dir / "status.json", {name: value for name, value in status.items() if name not in OF_BEST})
    if not path.is_file():
        start_empty(path)
    with path.open("r+b") as file:
        there = file.read(points)
        kept = points if len(there) == points else there.rfind(b"\n") + 1
        file.truncate(kept)
        os.fsync(file.fileno())
    if kept < points:
        say(f"ATTENTION: {path} is shorter than it was at the checkpoint: {points - kept} bytes of points are lost")


def copy_points(source: Path, run_dir: Path, points: int, say: Callable[[str], None]) -> None:
    """Copy the points up to the checkpoint from the folder of the run that is resumed.

    Args:
        points: bytes of its metrics.jsonl.
        say: called with a warning if the file is shorter.
    """
    path = source / POINTS
    there = _head(path, points) if path.is_file() else b""
    with replacing(run_dir / POINTS) as part:
        part.write_bytes(there[: there.rfind(b"\n") + 1])
    if len(there) < points:
        say(f"ATTENTION: {path} is shorter than it was at the checkpoint: the curves of this run are not whole")


def _head(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        return file.read(size)
