"""The checkpoints of a run: a sealed folder for each, which is the newest whole one, and which are kept.

checkpoints/step-000000120/   checkpoint.json, worker-N.safetensors, and what else the strategy's processes keep
checkpoints/latest            the name of the newest
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint import sealed
from trainer.errors import UserError

FORMAT = 1
ABOUT, LATEST = "checkpoint.json", "latest"
NAME = re.compile(r"step-(\d{9,})")
UNFINISHED = re.compile(r"step-\d{9,}\.partial")


@dataclass(frozen=True)
class Watched:
    """The metric that marks the best model: its value after this very update, if it was measured then; whether less is better."""

    metric: str
    value: float | None
    falls: bool

    @property
    def worth(self) -> float:
        """More is better."""
        value = float("-inf") if self.value is None else self.value
        return -value if self.falls else value


@dataclass(frozen=True)
class About:
    """What ``checkpoint.json`` tells.

    Attributes:
        step: updates done; epoch, update: in which the run goes on, and updates done in it; samples: trained on so far.
        points: bytes of metrics.jsonl at that time.
        config: of the run, without secrets; strategy, workers, global_batch_size, total_steps: of its plan.
        versions: of the packages that wrote it.
    """

    step: int
    epoch: int
    update: int
    samples: int
    points: int
    watched: Watched
    config: dict[str, Any]
    strategy: str
    workers: int
    global_batch_size: int
    total_steps: int
    versions: dict[str, str]


def folder_of(checkpoints: Path, step: int) -> Path:
    """The checkpoint after so many updates."""
    return checkpoints / f"step-{step:09d}"


def part_of(worker: int) -> str:
    """The file of a worker."""
    return f"worker-{worker}.safetensors"


def found(checkpoints: Path) -> list[Path]:
    """The folders of checkpoints, the newest first; whether they are whole is another question."""
    steps = {path: int(match[1]) for path in _entries(checkpoints) if (match := NAME.fullmatch(path.name))}
    return sorted((path for path in steps if path.is_dir()), key=lambda path: -steps[path])


def newest_whole(checkpoints: Path, say: Callable[[str], None] = lambda line: None) -> Path | None:
    """The newest checkpoint of which every byte is as it was written; None: there is none.

    Args:
        say: is told of those that are newer and damaged.
    """
    for folder in found(checkpoints):
        try:
            return check(folder)
        except UserError as error:
            say(f"passed over: {error.what}: {error.why}")
    return None


def check(folder: Path, verify: bool = True) -> Path:
    """A checkpoint that is whole.

    Args:
        verify: every file is read and its checksum compared; sizes always are.

    Raises:
        UserError: it is not; it names the file.
    """
    return sealed.whole(folder, FORMAT, verify)


def about(folder: Path) -> About:
    """What ``checkpoint.json`` tells.

    Raises:
        UserError: it cannot be read.
    """
    path = folder / ABOUT
    try:
        told = json.loads(path.read_text())
        watched = Watched(**told.pop("watched"))
        return About(watched=watched, **told)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UserError(str(path), f"it cannot be read ({error})") from error


def complete(folder: Path, names: Sequence[str]) -> None:
    """Make what was written the checkpoint, and the newest one.

    Raises:
        UserError: a file is missing or damaged.
    """
    sealed.complete(folder, [ABOUT, *names], FORMAT)
    sealed.durable_text(folder.parent / LATEST, folder.name + "\n")


def retire(checkpoints: Path, newest: Path, last: int, best: int) -> list[Path]:
    """Remove older checkpoints, each at once, and what was never completed; returns those that are gone.

    Args:
        newest: is whole; it stays, and so do the ``last`` newest and the ``best`` of those with a watched value.
    """
    whole = [path for path in found(checkpoints) if (path / sealed.MARKER).is_file()]
    kept = {newest, *whole[:last], *_best(whole, best)}
    gone = [path for path in whole if path not in kept]
    for path in gone:
        _remove(path)
    _forget_unfinished(checkpoints, newest)
    return gone


def forget_unfinished(checkpoints: Path) -> None:
    """Before a run goes on: remove what the one before did not complete."""
    _forget_unfinished(checkpoints, None)


def _forget_unfinished(checkpoints: Path, newest: Path | None) -> None:
    """Of checkpoints before the newest; None: of all."""
    for path in _entries(checkpoints):
        if UNFINISHED.fullmatch(path.name) and (newest is None or path.name < newest.name):
            shutil.rmtree(path, ignore_errors=True)


def _remove(folder: Path) -> None:
    """The marker goes first: a folder of which a part is gone is no checkpoint."""
    (folder / sealed.MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _best(folders: Sequence[Path], count: int) -> list[Path]:
    """Those of the best validations."""
    told = {path: about(path).watched for path in folders} if count else {}
    measured = [path for path, watched in told.items() if watched.value is not None]
    return sorted(measured, key=lambda path: told[path].worth, reverse=True)[:count]


def _entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.is_symlink()) if folder.is_dir() else []
