"""The queue: one SQLite file (WAL, 0600) in ``$TRAINER_HOME`` with a row for each run.

A run moves through these states. The submitter makes it ``queued``; the host's one runner moves it on, and whoever asks
for a cancellation writes that into ``asked``, which the runner follows::

    queued --> starting --> running --> done | failed | cancelled
       ^                       |
       '---- pre-empted <------'   (exit code 75, or its processes are gone without an exit code)

Invariant: a run has processes only in ``starting`` and ``running``, and these hold the lock ``runs/NUMBER.alive``.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from trainer.errors import UserError, why

HOME = "TRAINER_HOME"
"""The variable that names the folder of the queue."""
FILE = "queue.sqlite"
QUEUED, STARTING, RUNNING, PREEMPTED = "queued", "starting", "running", "pre-empted"
DONE, FAILED, CANCELLED = "done", "failed", "cancelled"
WAITING, ALIVE, OVER = (QUEUED, PREEMPTED), (STARTING, RUNNING), (DONE, FAILED, CANCELLED)
CANCEL, LEAVE, MAKE_ROOM = "cancel", "leave", "make room"
"""What a run is asked for: to end, to save and end (SIGTERM), to save and wait again for slots."""
BUSY_S = 30.0
"""Longest wait for another process that writes."""
TABLE = """
CREATE TABLE IF NOT EXISTS runs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE, name TEXT NOT NULL, folder TEXT NOT NULL,
    log TEXT NOT NULL, words TEXT NOT NULL, command TEXT NOT NULL, started_in TEXT NOT NULL,
    environment TEXT NOT NULL, priority INTEGER NOT NULL, sweep INTEGER, parallel INTEGER NOT NULL,
    cores INTEGER NOT NULL, gpus INTEGER NOT NULL, memory INTEGER NOT NULL,
    grace_s REAL NOT NULL, max_preemptions INTEGER,
    state TEXT NOT NULL, reason TEXT NOT NULL, asked TEXT NOT NULL, slots TEXT NOT NULL, code INTEGER,
    life INTEGER NOT NULL, preempted INTEGER NOT NULL, lost INTEGER NOT NULL, max_lost INTEGER NOT NULL,
    submitted REAL NOT NULL, began REAL, ended REAL
);
CREATE INDEX IF NOT EXISTS by_state ON runs (state);
"""


@dataclass(frozen=True)
class Slots:
    """Slots of a host, or of a run.

    Attributes:
        cores: their numbers. gpus: what ``CUDA_VISIBLE_DEVICES`` takes for each. memory: bytes.
    """

    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    memory: int = 0


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A run as it is put into the queue: what starts it, and what it needs.

    Attributes:
        key: the same key is the same run. name: on the screen. folder: of the run. log: its lines. words: of the
        command, as typed. command: starts Python. started_in: the working folder. environment: variables.
        priority: more comes first. sweep: number of the first run of its sweep (0: of this submission's first);
        parallel: so many of them at a time; 0: all.
        cores, gpus, memory (bytes): its slots. grace_s: so long it may take to save.
        max_preemptions: so often it may be pre-empted; None: no limit. max_lost: so often its processes may be gone.
    """

    name: str
    folder: str
    log: str
    words: list[str]
    command: list[str]
    started_in: str
    environment: dict[str, str] = field(repr=False)
    key: str | None = None
    priority: int = 0
    sweep: int | None = None
    parallel: int = 0
    cores: int = 1
    gpus: int = 0
    memory: int = 0
    grace_s: float = 30.0
    max_preemptions: int | None = None
    max_lost: int = 3


@dataclass(frozen=True, kw_only=True)
class Run(Submission):
    """A run in the queue: a row of the table.

    Attributes:
        number: in the queue. state, reason: where it is, and why it waits or how it ended. asked: what it is to do.
        slots: those it has. code: exit code. life: how often it was started. preempted, lost: how often.
        submitted, began, ended: seconds since 1970.
    """

    number: int
    state: str = QUEUED
    reason: str = ""
    asked: str = ""
    slots: Slots = field(default_factory=Slots)
    code: int | None = None
    life: int = 0
    preempted: int = 0
    lost: int = 0
    submitted: float = 0.0
    began: float | None = None
    ended: float | None = None


AS_JSON = ("words", "command", "environment", "slots")
NAMES = tuple(one.name for one in fields(Run))


def home() -> Path:
    """Return the folder of the queue: ``$TRAINER_HOME``, else ``~/.trainer``."""
    return Path(os.environ.get(HOME) or Path.home() / ".trainer").absolute()


class Queue:
    """The queue in a folder. Every method is one transaction; processes of this host may share the file.

    Raises:
        UserError: the folder or the file cannot be used.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = home() if folder is None else folder
        try:
            (self.folder / "runs").mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self.folder / FILE, os.O_CREAT | os.O_RDWR, 0o600))
            self._base = sqlite3.connect(self.folder / FILE, timeout=BUSY_S, isolation_level=None)
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA synchronous=NORMAL")
            self._base.executescript(TABLE)
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"{HOME}={self.folder}", f"the queue cannot be used: {why(error)}", f"{HOME}=FOLDER"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    @contextmanager
    def change(self) -> Iterator[None]:
        """Context manager: what is read and written inside is one transaction, alone."""
        self._base.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._base.execute("ROLLBACK")
            raise
        self._base.execute("COMMIT")

    def add(self, runs: Sequence[Submission]) -> list[int]:
        """Put runs into the queue, which are started in this order; returns their numbers. A key that is there already
        is the run that has it."""
        numbers: list[int] = []
        with self.change():
            for run in runs:
                if run.key and (before := self.with_key(run.key)) is not None:
                    numbers.append(before.number)
                    continue
                numbers.append(self._insert({**vars(run), "submitted": time.time()}))
                if run.sweep == 0:
                    self.set(numbers[-1], sweep=numbers[0])
        return numbers

    def _insert(self, row: Mapping[str, Any]) -> int:
        row = {**vars(START), **row}
        names = [name for name in NAMES if name != "number"]
        marks = ", ".join("?" * len(names))
        text = f"INSERT INTO runs ({', '.join(names)}) VALUES ({marks})"  # the names are ours  # nosec B608
        number = self._base.execute(text, [_stored(name, row.get(name)) for name in names]).lastrowid
        assert number is not None
        return number

    def set(self, number: int, **values: Any) -> None:
        """Change columns of a run."""
        changes = ", ".join(f"{name} = ?" for name in values)
        text = f"UPDATE runs SET {changes} WHERE number = ?"  # the names are ours  # nosec B608
        self._base.execute(text, [*(_stored(name, value) for name, value in values.items()), number])

    def move(self, number: int, before: Sequence[str], **values: Any) -> bool:
        """Change columns of a run that is in one of these states; returns whether it was."""
        with self.change():
            run = self.run(number)
            if run is None or run.state not in before:
                return False
            self.set(number, **values)
        return True

    def run(self, number: int) -> Run | None:
        """Return a run by its number; None: there is none."""
        return next(iter(self._runs("WHERE number = ?", (number,))), None)

    def with_key(self, key: str) -> Run | None:
        """Return the run that has a key; None: none has."""
        return next(iter(self._runs("WHERE key = ?", (key,))), None)

    def in_folder(self, folder: str) -> Run | None:
        """Return the newest run of a folder; None: there is none."""
        return next(iter(self._runs("WHERE folder = ? ORDER BY number DESC LIMIT 1", (folder,))), None)

    def in_states(self, states: Sequence[str]) -> list[Run]:
        """Return the runs in these states, first those that come first."""
        marks = ", ".join("?" * len(states))
        return self._runs(f"WHERE state IN ({marks}) ORDER BY priority DESC, number", tuple(states))

    def newest(self, limit: int) -> list[Run]:
        """Return the newest runs, oldest first."""
        return self._runs("ORDER BY number DESC LIMIT ?", (limit,))[::-1]

    def _runs(self, which: str, values: Sequence[Any]) -> list[Run]:
        names = ", ".join(NAMES)
        with closing(self._base.execute(f"SELECT {names} FROM runs {which}", values)) as found:  # nosec B608
            return [_run(row) for row in found]


START = Run(name="", folder="", log="", words=[], command=[], started_in="", environment={}, number=0)
"""Values of a run that a submission does not have."""


def _stored(name: str, value: Any) -> Any:
    if name == "slots":
        value = asdict(value)
    return json.dumps(value) if name in AS_JSON else value


def _run(row: tuple[Any, ...]) -> Run:
    values = {name: json.loads(value) if name in AS_JSON else value for name, value in zip(NAMES, row, strict=True)}
    slots = values.pop("slots")
    return Run(slots=Slots(tuple(slots.get("cores")), tuple(slots.get("gpus")), slots.get("memory")), **values)
