"""Launchers that start a command for each process: on this host by any program, such as ``nice``, ``numactl`` or a container's."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.host import private
from trainer.host.board import OwnBoard
from trainer.launch.process import Failure
from trainer.planning.assignment import Assignment
from trainer.planning.launcher import Launcher

if TYPE_CHECKING:
    from trainer.launch.engine import Start

POLL_S = 0.05


@dataclass(frozen=True)
class Task:
    """One process of the plan.

    Attributes:
        role, rank, device: e.g. ``worker``, 0 and ``cuda:0``.
        command: what to run; it writes its own log, and leaves what it returns on the run's board.
        environment: variables of the process, beside those of this one.
        log: where all that it prints goes.
    """

    role: str
    rank: int
    device: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path


class Running(Protocol):
    """A command that was started. :class:`subprocess.Popen` is one."""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""

    def kill(self) -> None:
        """End it, whatever it does."""


class TaskLauncher(Launcher):
    """Starts each process of this host as a command."""

    def refuse(self, config: RunConfig, workers: int, others: int) -> list[UserError]:
        if "TORCHELASTIC_RUN_ID" not in os.environ or "RANK" not in os.environ:
            return []
        return [UserError(f"launch._target_={config.launch._target_}", "torchrun has started the processes already", "launch=local")]  # fmt: skip

    @abstractmethod
    def launch(self, task: Task) -> Running:
        """Start a process, and return at once."""

    def start(self, assignment: Assignment) -> dict[str, Any]:
        from trainer.launch.start import start_processes

        return start_processes(assignment, Commands(self.launch))


class TaskHandle:
    """A started command, as the supervisor sees it.

    Args:
        board: of the run, where the process leaves what it returns.
    """

    def __init__(self, task: Task, running: Running, board: OwnBoard) -> None:
        self.log, self.running = task.log, running
        self.board = board.under(place_of(task.role, task.rank))
        self.returned = False
        self.value: Any = None
        self.failure: Failure | None = None

    @property
    def exitcode(self) -> int | None:
        """None while it runs."""
        return self.running.poll()

    @property
    def well(self) -> bool:
        """It has ended and done its work."""
        return self.exitcode == 0 and self.returned

    def look(self) -> None:
        """Take what it has left."""
        if not self.returned and self.board.check(["value"]):
            self.value, self.returned = json.loads(self.board.get("value")), True
        if self.failure is None and self.board.check(["failure"]):
            self.failure = Failure(**json.loads(self.board.get("failure")))

    def signs(self) -> list[Any]:
        """Nothing tells: the supervisor looks again soon."""
        return []

    def dismiss(self) -> None:
        """Let it end: nobody needs it any more."""
        self.board.set("leave", "")

    def signal(self, number: signal.Signals) -> None:
        """End it, if it is still there."""
        if self.exitcode is None:
            self.running.kill()

    def join(self, seconds: float) -> None:
        """Wait until it has ended, for so long."""
        until = time.monotonic() + seconds
        while self.exitcode is None and time.monotonic() < until:
            time.sleep(POLL_S)


def place_of(role: str, rank: int) -> str:
    """The process's own part of the board."""
    return f"task/{role}/{rank}"


class Commands:
    """An engine: each process is a command that a launcher starts.

    Args:
        launch: of the launcher.
    """

    def __init__(self, launch: Callable[[Task], Running]) -> None:
        self.launch = launch

    def prepare(self, scratch: Path) -> None:
        """As :class:`trainer.launch.engine.Engine`'s: nothing."""

    def begin(self, start: Start, board: OwnBoard) -> TaskHandle:
        """As :class:`trainer.launch.engine.Engine`'s. What the process is told is in a file for this user alone."""
        name = start.role.name
        file = start.scratch / f"{name}.{start.rank}.json"
        private.write(file, json.dumps(told(start)))
        line = (sys.executable, "-m", "trainer.launch.task_process", str(file))
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **start.environment}
        task = Task(name, start.rank, start.role.devices[start.index], line, environment, start.log)
        return TaskHandle(task, self.launch(task), board)


def told(start: Start) -> dict[str, Any]:
    """All of it as plain data."""
    return {
        **vars(start),
        "role": {**asdict(start.role), "devices": list(start.role.devices)},
        "payload": start.payload.as_dict(),
        "place": {**asdict(start.place), "secret": start.place.secret.hex()},
        "log": str(start.log),
        "scratch": str(start.scratch),
    }
