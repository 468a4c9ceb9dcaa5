"""The launcher contract: what ``launch._target_`` names turns a plan into processes and runs them to their end.

A :class:`Launcher` gets an :class:`Assignment`, which is what each process of the run gets as well: the finished config
and the plan. Its :class:`Supervision` is for the launcher alone.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config.instantiate import call_target
from trainer.config.own_keys import OwnKeys
from trainer.config.run_config import RunConfig, typed
from trainer.config.schema import LaunchConfig
from trainer.data.batch_reordering import Rewind
from trainer.errors import Died, RunFailed, UserError
from trainer.host import machine_limits
from trainer.host.notes_board import Board
from trainer.planning.plan import Plan
from trainer.wording import counted

WINDOW_S = 3600.0
"""Time within which ``launch.max_restarts`` restarts are allowed."""


class Deaths:
    """Counts how often processes of the run have died, and allows a limited number of restarts in an hour.

    Args:
        most: allowed restarts within an hour. clock: time in seconds.

    Attributes:
        returned: how workers died that were started again while the others went on.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self.clock = most, clock
        self.times = deque[float]()
        self.before: Died | None = None
        self.returned = list[str]()

    def left(self) -> int:
        """How many restarts are allowed now."""
        while self.times and self.clock() - self.times[0] > WINDOW_S:
            self.times.popleft()
        return self.most - len(self.times)

    def count(self) -> str:
        """Count a restart, of all processes or of one alone; returns in words which of how many it is."""
        self.times.append(self.clock())
        return f"restart {len(self.times)} of {self.most}"

    def restart(self, death: Died) -> str:
        """Allow a restart after this death; returns in words which of how many it is.

        Raises:
            RunFailed: it has none.
        """
        most, before = self.most, self.before
        if not most:
            raise death
        if before is not None and (death.who, death.update) == (before.who, before.update):
            why = f"{death.who} died after update {death.update} twice in a row: the run is not started again"
            raise RunFailed(f"{death}\n{why}") from death
        if self.left() <= 0:
            often = f"{counted(most, 'restart')} within an hour (launch.max_restarts): the run is not started again"
            raise RunFailed(f"{death}\nafter {often}") from death
        self.before = death
        return self.count()


@dataclass(frozen=True)
class Supervision:
    """What the job hands to its launcher alone, and to no process.

    Attributes:
        deaths: counts the deaths of the run; the launcher starts single processes again while the count allows; None:
        it starts none again. watch: the launcher calls this from time to time: while the hosts meet with None, and
        while the processes run with the board of the run. store: of the hosts, which have agreed on the run's folder
        in it (:mod:`trainer.launch.agreed_folder`); None: it is opened when the hosts meet.
    """

    deaths: Deaths | None = None
    watch: Callable[[Board | None], None] = lambda board: None
    store: Any = None


@dataclass(frozen=True)
class Assignment:
    """What a process of the run is started with; the same for all processes.

    Attributes:
        files: of mode=predict, the files to read, relative to predict.input. secrets: values that no output shows.
        imported: packages that the launcher imported while it checked the config. resume: folder of the checkpoint from
        which the run resumes; empty: the run begins. rewinds: since that checkpoint, how the batches come in another
        order (:mod:`trainer.data.batch_reordering`). data: the fingerprint of the data, for checkpoints; empty: there
        is none, or host 0 has it. tested: the update after which an earlier life of the run measured the test data, and
        the values; (0, {}): none did. again: processes of this job have run before, and one has died.
    """

    config: RunConfig
    plan: Plan
    files: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    imported: tuple[str, ...] = ()
    resume: str = ""
    rewinds: tuple[Rewind, ...] = ()
    data: str = ""
    tested: tuple[int, dict[str, float]] = (0, {})
    again: bool = False

    @property
    def goes_on(self) -> bool:
        """Whether the run has run before: logs are appended to."""
        return self.again or bool(self.resume)

    def as_dict(self) -> dict[str, Any]:
        """Return this assignment as plain data for JSON."""
        return {
            "config": self.config.plain(),
            "plan": self.plan.as_dict(),
            "files": self.files,
            "secrets": self.secrets,
            "imported": self.imported,
            "resume": self.resume,
            "rewinds": self.rewinds,
            "data": self.data,
            "tested": self.tested,
            "again": self.again,
        }

    @staticmethod
    def of(plain: Mapping[str, Any]) -> Assignment:
        """Make an assignment of what :meth:`as_dict` returned, after JSON."""
        lists: dict[str, Any] = {name: tuple(plain[name]) for name in ("files", "secrets", "imported")}
        step, tested = plain.get("tested", (0, {}))
        return Assignment(
            RunConfig.of(plain["config"]),
            Plan.of(plain["plan"]),
            **lists,
            resume=plain["resume"],
            rewinds=tuple(Rewind(*rewind) for rewind in plain.get("rewinds", ())),
            data=str(plain.get("data", "")),
            tested=(step, tested),
            again=bool(plain.get("again", False)),
        )


Starter = Callable[[Assignment, Supervision], dict[str, Any]]
"""Starts the processes of an assignment's plan, runs them to their end, and returns worker 0's outcome."""


class Launcher(ABC):
    """Base class of launchers: turns the plan into this host's processes, and runs them to their end.

    A launcher is made when a config is checked, so that its module imports nothing heavy: what it needs at the start it
    imports in ``start``. One that starts a command for each process is a :class:`trainer.launch.tasks.TaskLauncher`.

    Args:
        config: the keys of the ``launch`` node, without ``_target_``.

    Attributes:
        options: the keys that the schema knows; keys of one's own are in ``config``.
    """

    def __init__(self, **config: Any) -> None:
        self.config = OwnKeys("launch", config)
        self.options = typed(LaunchConfig, config)

    def refuse(self, config: RunConfig, workers: int, others: int) -> list[UserError]:
        """Return every reason why this launcher cannot start this many workers and other processes over all hosts."""
        return []

    @abstractmethod
    def start(self, assignment: Assignment, supervision: Supervision) -> dict[str, Any]:
        """Run this host's processes to their end; returns what the first worker here returned.

        Raises:
            RunFailed: a process died that the others cannot do without; all others are ended.
            Interrupted: the run was ended from outside.
        """


def launcher_of(config: RunConfig) -> Launcher:
    """Instantiate the launcher that ``launch._target_`` names.

    Raises:
        UserError: it is no launcher, or does not take its keys.
    """
    made: Launcher = call_target(config.node("launch"), "launch", kind=Launcher)
    return made


def start_here(assignment: Assignment, supervision: Supervision) -> dict[str, Any]:
    """Run this host's part of the plan with the config's launcher; returns its first worker's result."""
    launcher = launcher_of(assignment.config)
    with machine_limits.named():
        outcome = launcher.start(assignment, supervision)
    if not isinstance(outcome, Mapping):
        name = f"{type(launcher).__module__}.{type(launcher).__qualname__}"
        raise RunFailed(
            f"{name}: start returned something of type {type(outcome).__name__}. Return the dict that the "
            f"first worker of this host returned"
        )
    return dict(outcome)
