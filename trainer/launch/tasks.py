"""Base of launchers that start one command per process, through any program such as ``nice`` or ``numactl``."""

from __future__ import annotations

import contextlib
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
from trainer.errors import RunFailed, UserError, failed, why
from trainer.host import json_text, private, torchrun
from trainer.host.notes_board import OwnBoard
from trainer.host.signals import TooLong, within
from trainer.launch.process import Failure
from trainer.planning.launcher import Assignment, Launcher, Supervision
from trainer.visible import shortened

if TYPE_CHECKING:
    from trainer.launch.engine import Start

POLL_S = 0.05
BEGUN = "begun"
"""Key of the note that a task's process has begun."""


@dataclass(frozen=True)
class Task:
    """One process of the plan as a :class:`TaskLauncher` gets it: its command and environment.

    Attributes:
        role, rank, device: e.g. ``worker``, 0 and ``cuda:0``.
        command: what to run; it writes its own log, and its result to the run's board.
        environment: variables of the process, in addition to those of this process.
        log: file of its output.
    """

    role: str
    rank: int
    device: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path


class Running(Protocol):
    """Protocol of a started command, such as :class:`subprocess.Popen`."""

    def poll(self) -> int | None:
        """The command's exit code, negative for a signal; None while it runs."""

    def kill(self) -> None:
        """End the command unconditionally."""


class TaskLauncher(Launcher):
    """Base class of launchers that start each process of this host as a command; subclasses write :meth:`launch`."""

    def refuse(self, config: RunConfig, workers: int, others: int) -> list[UserError]:
        if not torchrun.is_rank():
            return []
        return [
            UserError(
                f"launch._target_={config.launch._target_}",
                "torchrun has started the processes already",
                "launch=local",
            )
        ]

    @abstractmethod
    def launch(self, task: Task) -> Running:
        """Start the command of one process and return at once."""

    def start(self, assignment: Assignment, supervision: Supervision) -> dict[str, Any]:
        from trainer.launch.start import start_processes

        name = f"{type(self).__module__}.{type(self).__qualname__}"
        commands = Commands(self.launch, name, assignment.config.launch.timeout_s)
        return start_processes(assignment, supervision, commands)


class TaskHandle:
    """The handle of a started command, as the supervisor sees it.

    Args:
        board: the run's board, on which the process notes its beginning and its result.
        timeout_s: longest wait until the process has begun.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        task: Task,
        running: Running,
        board: OwnBoard,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.task, self.log, self.running = task, task.log, running
        self.board = board.under(place_of(task.role, task.rank))
        self.timeout_s, self.clock = timeout_s, clock
        self.began, self.started_ns = clock(), time.monotonic_ns()
        self.arrived = self.returned = self.dismissed = False
        self.value: Any = None
        self.failure: Failure | None = None

    @property
    def exitcode(self) -> int | None:
        """The command's exit code; None while it runs.

        Raises:
            RunFailed: the user's ``poll`` raises, or returns something else.
        """
        what = f"what launch returned for {self.task.role} {self.task.rank}"
        try:
            code = self.running.poll()
        except Exception as error:
            raise failed(what, "poll", self.running.poll, error) from error
        if code is not None and not isinstance(code, int):
            raise RunFailed(
                f"{what}: poll() returned something of type {type(code).__name__}, not an exit code, or None "
                f"while the process runs"
            )
        return code

    @property
    def well(self) -> bool:
        """Whether the process has ended successfully."""
        return self.exitcode == 0 and self.returned

    def poll(self) -> None:
        """Read the process's notes on the board; a process that has not begun in time has failed."""
        if not self.arrived:
            self.arrived = self.board.check([BEGUN])
            if not self.arrived and self.failure is None and self.clock() - self.began > self.timeout_s:
                self.failure = Failure(self.started_ns, self._silent(), for_users=True, ends_run=True)
        if not self.returned and self.board.check(["value"]):
            self.value, self.returned = json_text.loads(self.board.get("value")), True
        if self.failure is None and self.board.check(["failure"]):
            self.failure = Failure(**json_text.loads(self.board.get("failure")))

    def _silent(self) -> str:
        """Why a process that has not begun counts as failed; names the program that runs instead, if it is known."""
        arguments = getattr(self.running, "args", None)
        words = [arguments] if isinstance(arguments, str) else [str(word) for word in arguments or ()]
        program = f" (it runs: {shortened(' '.join(words))})" if words else ""
        return (
            f"has not begun within {self.timeout_s:g} s (launch.timeout_s). Its launcher must run task.command "
            f"with the variables of task.environment{program}"
        )

    def signs(self) -> list[Any]:
        """Return no signs, so that the supervisor polls."""
        return []

    def dismiss(self) -> None:
        """Let the process end. The note is written once: later the board may be gone."""
        if not self.dismissed:
            self.dismissed = True
            self.board.set("leave", "")

    def dump(self) -> bool:
        """Return False: a command cannot be asked for its stacks, as another program may run the process."""
        return False

    def signal(self, number: signal.Signals) -> None:
        """End the command, if it still exists, whatever the signal."""
        try:
            if self.exitcode is None:
                self.running.kill()
        except Exception as error:  # the other processes must be ended as well
            print(f"{self.task.role} {self.task.rank} cannot be ended: {why(error)}", flush=True)

    def join(self, seconds: float) -> None:
        """Wait until the command has ended, at most ``seconds``."""
        until = time.monotonic() + seconds
        with contextlib.suppress(RunFailed):  # the user's poll fails, which was reported before
            while self.exitcode is None and time.monotonic() < until:
                time.sleep(POLL_S)


def place_of(role: str, rank: int) -> str:
    """The part of the run's board for the notes of a task's process: its beginning, result and end."""
    return f"task/{role}/{rank}"


class Commands:
    """The engine of task launchers: each process is a command that the launcher starts.

    Args:
        launch: the launcher's method.
        name: the name of the launcher's class.
        timeout_s: longest wait until ``launch`` has returned, and from then on until the process has begun.
    """

    can_restart = False
    """Notes are kept by rank, so each rank can have only one process."""

    def __init__(self, launch: Callable[[Task], Running], name: str, timeout_s: float) -> None:
        self.launch, self.name, self.timeout_s = launch, name, timeout_s

    def prepare(self, scratch: Path) -> None:
        """Do nothing: commands need no preparation."""

    def begin(self, start: Start, board: OwnBoard) -> TaskHandle:
        """Have the launcher start a process's command; a private file holds the process's :class:`Start`."""
        name = start.role.name
        file = start.scratch / f"{name}.{start.rank}.json"
        private.write(file, json.dumps(as_json_data(start)))
        line = (sys.executable, "-m", "trainer.launch.task_process", str(file))
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **start.environment}
        task = Task(name, start.rank, start.role.devices[start.index], line, environment, start.log)
        try:
            return TaskHandle(task, self._launched(task), board, self.timeout_s)
        except BaseException:
            file.unlink(missing_ok=True)  # without this file an unwatched process ends
            raise

    def _launched(self, task: Task) -> Running:
        """Call the user's ``launch``.

        Raises:
            RunFailed: ``launch`` raises, does not return in time, or returns something that cannot be watched.
        """
        who = f"{task.role} {task.rank}"
        try:
            with within(self.timeout_s):
                running = self.launch(task)
        except TooLong:
            raise RunFailed(
                f"{self.name}: launch of {who} has not returned within {self.timeout_s:g} s "
                f"(launch.timeout_s). It must return at once: start the command with subprocess.Popen, not "
                f"with subprocess.run"
            ) from None
        except OSError as error:
            raise RunFailed(f"{self.name} cannot start {who}: {error}") from error
        except Exception as error:
            raise failed(self.name, f"launch of {who}", self.launch, error) from error
        if lacking := [name for name in ("poll", "kill") if not callable(getattr(running, name, None))]:
            named = f"something of type {type(running).__name__}, which has no {' and no '.join(lacking)}"
            kind = "None" if running is None else named
            raise RunFailed(
                f"{self.name}: launch returned {kind} for {who}. Return something with poll() and kill(), "
                f"such as a subprocess.Popen"
            )
        return running


def as_json_data(start: Start) -> dict[str, Any]:
    """A :class:`Start` as plain data for JSON."""
    return {
        **vars(start),
        "role": {**asdict(start.role), "devices": list(start.role.devices), "ports": list(start.role.ports)},
        "payload": start.payload.as_dict(),
        "place": {**asdict(start.place), "secret": start.place.secret.hex()},
        "address": {**asdict(start.address), "secret": start.address.secret.hex()},
        "life": asdict(start.life),
        "log": str(start.log),
        "scratch": str(start.scratch),
    }
