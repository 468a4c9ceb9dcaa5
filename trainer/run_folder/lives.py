"""``lives.json``: the lives of a run. The start begins the first one, and each resume begins another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from trainer.errors import PREEMPTED
from trainer.host import json_text
from trainer.run_folder.json_files import leave
from trainer.run_folder.points import last_step

FILE = "lives.json"
REPORTED, LOST = ("done", "failed", "killed", PREEMPTED), "lost"
"""How a life ended: as its launcher reported, or ``lost`` without a report."""


@dataclass(frozen=True)
class LifeRecord:
    """One life of a run: from a start or a resume to its end.

    Attributes:
        number: from 1.
        began, ended: UTC, as ``2026-11-23T21:45:00+00:00``; empty: not known, or it runs.
        how: how it ended; empty: it runs.
        first, last: number of updates of the run when the life began and when it ended.
        why: the error that ended it, in one line.
    """

    number: int
    began: str
    ended: str = ""
    how: str = ""
    first: int = 0
    last: int = 0
    workers: int = 1
    command: str = ""
    why: str = ""


def read(run_dir: Path) -> tuple[LifeRecord, ...]:
    """Read the lives of a run so far; () if there is no file that can be read."""
    try:
        return tuple(LifeRecord(**life) for life in json_text.read(run_dir / FILE))
    except (OSError, ValueError, TypeError):
        return ()


def number(run_dir: Path) -> int:
    """The number of the run's current life; 1 without a lives.json (an evaluation)."""
    return max(1, len(read(run_dir)))


def begin(run_dir: Path, before: Iterable[LifeRecord], first: int, workers: int, command: str) -> LifeRecord:
    """Record that another life of the run begins.

    Args:
        before: the earlier lives, see :func:`past`. first: the update from which it resumes.
    """
    lives = tuple(before)
    life = LifeRecord(
        len(lives) + 1, _time(datetime.now(UTC)), first=first, last=first, workers=workers, command=command
    )
    _leave(run_dir, (*lives, life))
    return life


def planned(run_dir: Path, workers: int) -> None:
    """Record the final number of workers of the current life."""
    if found := read(run_dir):
        _leave(run_dir, (*found[:-1], replace(found[-1], workers=workers)))


def end(run_dir: Path, how: str, last: int, why: str = "") -> None:
    """Record how the current life ended, if one has begun."""
    found = read(run_dir)
    if not found or found[-1].how:
        return
    *before, life = found
    _leave(
        run_dir, (*before, replace(life, ended=_time(datetime.now(UTC)), how=how, last=max(last, life.first), why=why))
    )


def past(run_dir: Path) -> tuple[LifeRecord, ...]:
    """The lives of a run that is resumed; the end of a killed life is taken from ``status.json``."""
    *before, life = read(run_dir) or (LifeRecord(1, ""),)
    return (*before, life if life.how else _ended(run_dir, life))


def until(lives: Iterable[LifeRecord], step: int) -> tuple[LifeRecord, ...]:
    """The lives that began at or before update ``step``, renumbered, for a run that resumes from there."""
    return tuple(replace(life, number=n) for n, life in enumerate((one for one in lives if one.first <= step), 1))


def _ended(run_dir: Path, life: LifeRecord) -> LifeRecord:
    """The life with its end from status.json, where the state is still ``running`` if the machine died."""
    path = run_dir / "status.json"
    try:
        status, when = json_text.read(path), _time(datetime.fromtimestamp(path.stat().st_mtime, UTC))
        state, step = status.get("state"), int(status.get("step") or 0)
        its_own = status.get("life", life.number) == life.number
    except (OSError, ValueError, TypeError, AttributeError):
        return replace(life, how=LOST)
    if when < life.began:  # status.json is of the life before: this one has not begun to report
        return replace(life, how=LOST)
    how = state if state in REPORTED else LOST
    last = max(step, last_step(run_dir / "metrics.jsonl"), life.first) if its_own else life.first
    return replace(life, ended=when, how=how, last=last)


def _time(when: datetime) -> str:
    """A time, as lives.json writes it."""
    return when.isoformat(timespec="seconds")


def _leave(run_dir: Path, lives: Iterable[LifeRecord]) -> None:
    leave(run_dir / FILE, [asdict(life) for life in lives], private=True)
