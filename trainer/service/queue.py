"""The queue: one SQLite file (0600) in ``$TRAINER_HOME`` with a row for each run.

A run moves through these states. The submitter makes it ``queued``; runners, one on each host, move it on; and who asks
for a cancellation writes that into ``asked``, which the runners follow::

    queued --> starting --> running --> done | failed | cancelled
       ^                       |
       '---- pre-empted <------'   (exit code 75, or its processes are gone without an exit code)

A run on several hosts has a part on each of them. It gets slots on all of them in one transaction, or on none; it is
running when all parts are, and has ended when all parts have.

Invariant: a run has processes only in ``starting`` and ``running``, and those of a part hold the lock
``runs/NUMBER.HOST.alive``.

A run of another engine (``launch=slurm``) is ``submitted``: nothing here starts it, and the engine has its state.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from trainer.errors import RunFailed, UserError, why
from trainer.run_folder.folder_lock import user_name

HOME = "TRAINER_HOME"
"""The variable that names the folder of the queue."""
USER = "TRAINER_USER"
"""The variable that names who submits, where several people share one account."""
FILE, VERSION = "queue.sqlite", 2
"""The file, and the number of its format."""
HERE = "localhost"
"""The name of the only host of a queue on a disk of this machine, whose own name may change."""
OWN = "queue"
"""The engine of the runs that this queue starts itself."""
SUBMITTED = "submitted"
QUEUED, STARTING, RUNNING, PREEMPTED = "queued", "starting", "running", "pre-empted"
DONE, FAILED, CANCELLED = "done", "failed", "cancelled"
WAITING, ALIVE, OVER = (QUEUED, PREEMPTED), (STARTING, RUNNING), (DONE, FAILED, CANCELLED)
CANCEL, LEAVE, MAKE_ROOM = "cancel", "leave", "make room"
"""What a run is asked for: to end, to save and end (SIGTERM), to save and wait again for slots."""
ASSIGNED, STARTED, ENDED = "assigned", "started", "ended"
"""States of a part of a run."""
BUSY_S = 30.0
"""Longest wait for another process that writes."""
SILENT_S = 60.0
"""A host whose runner has not been heard of for so long gets no runs."""
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "9p")
"""File systems on which a file is not shared memory for all hosts, as SQLite's WAL needs it."""
TABLES = """
CREATE TABLE IF NOT EXISTS runs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE, name TEXT NOT NULL, folder TEXT NOT NULL,
    log TEXT NOT NULL, words TEXT NOT NULL, command TEXT NOT NULL, started_in TEXT NOT NULL, engine TEXT NOT NULL,
    user TEXT NOT NULL, code_version TEXT NOT NULL, ran_on TEXT NOT NULL,
    priority INTEGER NOT NULL, sweep INTEGER, parallel INTEGER NOT NULL,
    hosts INTEGER NOT NULL, cores INTEGER NOT NULL, gpus INTEGER NOT NULL, memory INTEGER NOT NULL,
    grace_s REAL NOT NULL, max_preemptions INTEGER, max_lost INTEGER NOT NULL,
    state TEXT NOT NULL, reason TEXT NOT NULL, asked TEXT NOT NULL, parts TEXT NOT NULL, code INTEGER,
    life INTEGER NOT NULL, fresh INTEGER NOT NULL, preempted INTEGER NOT NULL, lost INTEGER NOT NULL,
    submitted REAL NOT NULL, began REAL, ended REAL,
    environment TEXT NOT NULL, config TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_state ON runs (state);
CREATE INDEX IF NOT EXISTS by_folder ON runs (folder);
CREATE TABLE IF NOT EXISTS hosts (name TEXT PRIMARY KEY, slots TEXT NOT NULL, beat REAL NOT NULL);
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


@dataclass(frozen=True)
class Part:
    """What a run has on one host.

    Attributes:
        slots: its own. state: ``assigned``, ``started`` or ``ended``. boot: which start of the host it is of.
        meeting: of the first host: where the others find it. code: exit code of an ended part; None: it has left none.
    """

    slots: Slots
    state: str = ASSIGNED
    boot: str = ""
    meeting: str = ""
    code: int | None = None


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A run as it is put into the queue: what starts it, and what it needs.

    Attributes:
        key: the same key is the same run. name: on the screen. folder: of the run. log: its lines. words: of the
        command, as typed. command: starts Python. started_in: the working folder. environment: variables. config: the
        composed config as YAML ('': the words are composed at the start); of another engine's run ``launch`` as JSON.
        engine: ``queue``, or the one that has it. user: who has submitted it. code_version: of what, then.
        priority: more comes first. sweep: number of the first run of its sweep (0: of this submission's first);
        parallel: so many of them at a time; 0: all.
        hosts: how many; cores, gpus, memory (bytes): slots on each. grace_s: so long it may take to save.
        max_preemptions: so often it may be pre-empted; None: no limit. max_lost: so often its processes may be gone.
        state: ``queued``, or ``submitted`` to another engine.
    """

    name: str
    folder: str
    log: str
    words: list[str]
    command: list[str]
    started_in: str
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    config: str = field(default="", repr=False)
    engine: str = OWN
    user: str = ""
    code_version: str = ""
    key: str | None = None
    priority: int = 0
    sweep: int | None = None
    parallel: int = 0
    hosts: int = 1
    cores: int = 1
    gpus: int = 0
    memory: int = 0
    grace_s: float = 30.0
    max_preemptions: int | None = None
    max_lost: int = 3
    state: str = QUEUED


@dataclass(frozen=True, kw_only=True)
class Run(Submission):
    """A run in the queue: a row of the table. Its environment and config are read by :meth:`Queue.start_of`.

    Attributes:
        number: in the queue. reason: why it waits or how it ended. asked: what it is to do.
        parts: by host; the first is host 0. ran_on: the code that it was started on last. code: exit code.
        life: how often it was started. fresh: the life that began from the start. preempted,
        lost: how often. submitted, began, ended: seconds since 1970.
    """

    number: int
    reason: str = ""
    asked: str = ""
    parts: dict[str, Part] = field(default_factory=dict)
    ran_on: str = ""
    code: int | None = None
    life: int = 0
    fresh: int = 1
    preempted: int = 0
    lost: int = 0
    submitted: float = 0.0
    began: float | None = None
    ended: float | None = None

    @property
    def slots(self) -> Slots:
        """The slots of its first host; none where it has no processes."""
        return next((part.slots for part in self.parts.values()), Slots())


AS_JSON = ("words", "command", "environment", "parts")
ONLY_TO_START = ("environment", "config")
"""Columns that are large, and that only a start needs."""
NAMES = tuple(one.name for one in fields(Run))
SHORT = tuple(name for name in NAMES if name not in ONLY_TO_START)


def home() -> Path:
    """Return the folder of the queue: ``$TRAINER_HOME``, else ``~/.trainer``."""
    return Path(os.environ.get(HOME) or Path.home() / ".trainer").absolute()


def user() -> str:
    """Return who submits: ``$TRAINER_USER``, else the name of this account."""
    return os.environ.get(USER) or user_name(os.getuid())


def is_shared(folder: Path) -> bool:
    """Whether a folder is on a file system that several hosts may share."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return False
    places = {place.replace("\\040", " "): kind for _, place, kind, *_ in mounts}
    real = folder.resolve()
    kind = next((places[str(one)] for one in (real, *real.parents) if str(one) in places), "")
    return kind in NETWORK or kind.startswith("fuse.")


def hosts_there() -> dict[str, Slots]:
    """Return the hosts of the queue whose runners are there; makes no queue."""
    if not (home() / FILE).exists():
        return {}
    with closing(Queue()) as the_queue:
        return the_queue.hosts()


def this_host(folder: Path) -> str:
    """Return the name of this host in the queue of a folder."""
    return socket.gethostname() if is_shared(folder) else HERE


class Queue:
    """The queue in a folder. Every method is one transaction; processes may share the file.

    Raises:
        UserError: the folder or the file cannot be used.
        RunFailed: later, by any method: the disk is full, or another process holds the file.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = home() if folder is None else folder
        self._changes = 0
        what, instead = f"{HOME}={self.folder}", f"{HOME}=FOLDER"
        try:
            (self.folder / "runs").mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self.folder / FILE, os.O_CREAT | os.O_RDWR, 0o600))
            self._number = os.stat(self.folder / FILE).st_ino
            self._base = sqlite3.connect(self.folder / FILE, timeout=BUSY_S, isolation_level=None)
            self._base.execute("PRAGMA synchronous=FULL")  # a run is in the queue once its number is printed
            (version,) = self._base.execute("PRAGMA user_version").fetchone()
            if version != VERSION:
                self._make(what)
        except (OSError, sqlite3.Error) as error:
            raise UserError(what, f"the queue cannot be used: {why(error)}", instead) from error

    def _make(self, what: str) -> None:
        """Make the tables, which another process may do at the same time.

        Raises:
            UserError: the file is of another version of trainer.
        """
        # WAL needs memory that all processes share; on a network's disk only the older journal is safe.
        self._base.execute(f"PRAGMA journal_mode={'DELETE' if is_shared(self.folder) else 'WAL'}")
        with self.change():
            there = [name for (name,) in self._base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            (version,) = self._base.execute("PRAGMA user_version").fetchone()
            if "runs" in there and version != VERSION:
                reason = f"its queue is of another version of trainer (format {version}, not {VERSION})"
                raise UserError(
                    what, reason, f"mv {self.folder / FILE} {self.folder / FILE}.old, once its runs are over"
                )
            for statement in TABLES.split(";"):
                self._base.execute(statement)
            self._base.execute(f"PRAGMA user_version = {VERSION}")

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    @contextmanager
    def change(self) -> Iterator[None]:
        """Context manager: what is read and written inside is one transaction, alone."""
        self._ask("BEGIN IMMEDIATE")
        try:
            yield
            self._ask("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # a full disk has ended it already
                self._base.execute("ROLLBACK")
            raise

    def _ask(self, text: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Execute a statement.

        Raises:
            RunFailed: the file cannot be read or written now.
        """
        try:
            return self._base.execute(text, values)
        except sqlite3.OperationalError as error:
            raise RunFailed(f"{self.folder / FILE}: {error}") from error

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
        number = self._ask(text, [_stored(name, row.get(name)) for name in names]).lastrowid
        assert number is not None
        self._changes += 1
        return number

    def set(self, number: int, **values: Any) -> None:
        """Change columns of a run."""
        changes = ", ".join(f"{name} = ?" for name in values)
        text = f"UPDATE runs SET {changes} WHERE number = ?"  # the names are ours  # nosec B608
        self._ask(text, [*(_stored(name, value) for name, value in values.items()), number])
        self._changes += 1

    def check_place(self) -> None:
        """Check that this queue's file is still in its folder.

        Raises:
            RunFailed: it was removed, or another one is in its place.
        """
        try:
            same = os.stat(self.folder / FILE).st_ino == self._number
        except FileNotFoundError:
            same = False
        if not same:
            raise RunFailed(f"{self.folder / FILE}: the file of the queue was removed; runs that live go on unwatched")

    def version(self) -> tuple[int, int]:
        """Return what differs after each change of the runs. It reads none of them.

        What another process writes counts as a change, also a sign of life of its host.
        """
        ((others,),) = self._ask("PRAGMA data_version").fetchall()
        return others, self._changes

    def move(self, number: int, before: Sequence[str], in_life: int | None = None, **values: Any) -> bool:
        """Change columns of a run that is in one of these states, and in this life; returns whether it was."""
        with self.change():
            run = self.run(number)
            if run is None or run.state not in before or in_life not in (None, run.life):
                return False
            self.set(number, **values)
        return True

    def run(self, number: int) -> Run | None:
        """Return a run by its number; None: there is none."""
        return next(iter(self._runs("WHERE number = ?", (number,))), None)

    def between(self, first: int, last: int) -> list[Run]:
        """Return the runs with these numbers, both included, in order."""
        most = 2**63 - 1
        return self._runs("WHERE number BETWEEN ? AND ? ORDER BY number", (min(first, most), min(last, most)))

    def start_of(self, number: int) -> tuple[dict[str, str], str]:
        """Return the environment and the config of a run."""
        text = "SELECT environment, config FROM runs WHERE number = ?"
        ((environment, config),) = self._ask(text, (number,)).fetchall()
        return json.loads(environment), config

    def with_key(self, key: str) -> Run | None:
        """Return the run that has a key; None: none has."""
        return next(iter(self._runs("WHERE key = ?", (key,))), None)

    def in_folder(self, folder: str) -> Run | None:
        """Return the newest run of a folder; None: there is none."""
        return next(iter(self._runs("WHERE folder = ? ORDER BY number DESC LIMIT 1", (folder,))), None)

    def in_states(self, states: Sequence[str]) -> list[Run]:
        """Return the runs in these states, by priority, then by number."""
        marks = ", ".join("?" * len(states))
        return self._runs(f"WHERE state IN ({marks}) ORDER BY priority DESC, number", tuple(states))

    def newest(self, limit: int) -> list[Run]:
        """Return the newest runs, oldest first."""
        return self._runs("ORDER BY number DESC LIMIT ?", (limit,))[::-1]

    def beat(self, host: str, slots: Slots | None) -> None:
        """Note that a host's runner is there with these slots; None: it leaves."""
        if slots is None:
            self._ask("DELETE FROM hosts WHERE name = ?", (host,))
        else:
            row = (host, json.dumps(asdict(slots)), time.time())
            self._ask("INSERT OR REPLACE INTO hosts (name, slots, beat) VALUES (?, ?, ?)", row)

    def hosts(self) -> dict[str, Slots]:
        """Return the hosts whose runners are there, by name, with all their slots."""
        rows = self._ask("SELECT name, slots, beat FROM hosts ORDER BY name").fetchall()
        now = time.time()
        return {name: _slots(json.loads(slots)) for name, slots, beat in rows if abs(now - beat) <= SILENT_S}

    def _runs(self, which: str, values: Sequence[Any]) -> list[Run]:
        names = ", ".join(SHORT)
        with closing(self._ask(f"SELECT {names} FROM runs {which}", values)) as found:  # nosec B608
            return [_run(row) for row in found]


START = Run(name="", folder="", log="", words=[], command=[], started_in="", number=0)
"""Values of a run that a submission does not have."""


def _stored(name: str, value: Any) -> Any:
    if name == "parts":
        value = {host: asdict(part) for host, part in value.items()}
    return json.dumps(value) if name in AS_JSON else value


def _slots(plain: Mapping[str, Any]) -> Slots:
    return Slots(tuple(plain["cores"]), tuple(plain["gpus"]), plain["memory"])


def _run(row: tuple[Any, ...]) -> Run:
    values = {name: json.loads(value) if name in AS_JSON else value for name, value in zip(SHORT, row, strict=True)}
    parts = values.pop("parts")
    return Run(parts={host: Part(**{**part, "slots": _slots(part["slots"])}) for host, part in parts.items()}, **values)
