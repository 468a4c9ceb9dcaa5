"""The submitter contract: an engine gets the whole command as a job, and runs it on machines of its own.

A job of an engine moves through these states; the engine moves it, and :mod:`trainer.launch.engines.follow` prints each
change::

    pending --> running --> ended (exit code)
       ^           |
       '- requeued <- pre-empted, out of time, or a host lost

A submitter adds ``render`` and ``submit``. On the engine's machines the same command runs again, finds itself inside of
the job (``TRAINER_SUBMITTED``), and starts this host's processes as ``launch=local`` does.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from trainer.config.run_config import typed
from trainer.config.schema.run import SubmitLaunch
from trainer.errors import Interrupted, RunPreempted, UserError
from trainer.host.engine_tasks import ENGINE, SUBMITTED
from trainer.planning.launcher import Assignment, Launcher, Supervision

WITHOUT_FAULT = (0, RunPreempted.exit_code, Interrupted.exit_code)
"""Exit codes of jobs that have not failed."""
PENDING, RUNNING, REQUEUED, ENDED = "pending", "running", "requeued", "ended"


@dataclass(frozen=True)
class Needs:
    """What one host, or one process that is alone in its pod, needs of its machine; None: the engine's default.

    Attributes:
        memory: with a unit, as ``16G``.
    """

    cores: int | None = None
    memory: str | None = None
    gpus: int | None = None


@dataclass(frozen=True)
class Point:
    """One job of a sweep: its words, copies and config, as those of :class:`Job`, its folder, and its name on the
    screen."""

    words: tuple[str, ...]
    folder: Path
    name: str
    copies: str = ""
    frozen: str = field(default="", repr=False)


@dataclass(frozen=True)
class Job:
    """A command to run on an engine's machines. Pure data: a submitter renders it, and nothing is asked again there.

    Attributes:
        words: flags and overrides as typed, without quotes.
        folder: of the run, or of the sweep; fixed here once for all hosts and lives of the job.
        command: starts Python on the hosts, such as ``["/venv/bin/python"]``; ``-m trainer`` and the words follow.
        started_in: the working folder. hosts: their number. least_hosts: with ``launch.nnodes=MIN:MAX`` the MIN.
        workers, servers: processes over all hosts; workers None: one per GPU of a host, or one.
        needs: of a host.
        max_restarts: so many hosts may be lost. max_preemptions: so often it may be pre-empted; None: no limit.
        grace_s: the checkpoint after SIGTERM takes so long at most.
        options: the engine's own, by name. setup: lines of the shell before the command.
        points: the jobs of a sweep, in place of ``words``. numbers: theirs in the sweep; (): 0, 1, 2, ...
        swept: keys in which they differ. parallel: so many of them at a time; 0: all. held: the job is not to start
        before :meth:`Handle.release`.
        copies: the address where hosts that do not share the folder copy it to; '': they share it. config: the files
        of ``--config-dir`` for such hosts, packed. frozen: the composed config as YAML, for a submitter that freezes.
    """

    name: str
    words: tuple[str, ...]
    folder: Path
    command: tuple[str, ...]
    started_in: str
    hosts: int = 1
    least_hosts: int = 0
    workers: int | None = None
    servers: int = 0
    needs: Needs = field(default_factory=Needs)
    max_restarts: int = 3
    max_preemptions: int | None = None
    grace_s: float = 30.0
    options: Mapping[str, Any] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    points: tuple[Point, ...] = ()
    numbers: tuple[int, ...] = ()
    swept: tuple[str, ...] = ()
    parallel: int = 0
    held: bool = False
    copies: str = ""
    config: str = ""
    frozen: str = field(default="", repr=False)

    @property
    def engine_folder(self) -> Path:
        """The folder of the engine's files: script, secret, log, exit codes."""
        return self.folder / ENGINE

    @property
    def numbered(self) -> dict[int, Point]:
        """The jobs of a sweep by number."""
        return dict(zip(self.numbers or range(len(self.points)), self.points, strict=True))

    def refuse_range(self, why: str) -> None:
        """Refuse ``launch.nnodes=MIN:MAX``, for an engine whose jobs have a fixed number of hosts.

        Raises:
            UserError: with this reason.
        """
        if self.least_hosts:
            raise UserError(f"launch.nnodes={self.least_hosts}:{self.hosts}", why, f"launch.nnodes={self.hosts}")


@dataclass(frozen=True)
class State:
    """The state of a job.

    Attributes:
        phase: ``pending``, ``running``, ``requeued`` or ``ended``.
        reason: the engine's words, such as ``Resources``.
        code: the exit code of an ended job.
    """

    phase: str
    reason: str = ""
    code: int = 0

    def __str__(self) -> str:
        code = f" with exit code {self.code}" if self.phase == ENDED else ""
        return f"{self.phase}{code}{f' ({self.reason})' if self.reason else ''}"


class Unreachable(Exception):
    """The engine does not answer; the job may still run. The message is the engine's own."""


class Handle(ABC):
    """A submitted job.

    Attributes:
        name: in messages, such as ``Slurm job 12``. cancels: the command that cancels it. log: where its lines are.
        early: where those are that its hosts could not copy; '': nowhere.
        follows: the command that follows it again; '': there is none. resumes: the command that resumes its run.
        cancelled: what becomes of a run whose job is cancelled.
        winds_up_s: after a cancellation the job needs so long at most, in seconds, and is followed meanwhile.
        held: it was submitted with :attr:`Job.held`, and does not start before :meth:`release`.
    """

    name: str
    cancels: str
    log: str
    early: str = ""
    follows: str = ""
    resumes: str = ""
    cancelled: str = ""
    winds_up_s: float = 0.0
    held: bool = False

    @abstractmethod
    def state(self) -> State:
        """Ask the engine for the job's state.

        Raises:
            Unreachable: it does not answer.
        """

    @abstractmethod
    def lines(self) -> Iterator[str]:
        """Yield what the job has printed since the last call; the text may end within a line."""

    @abstractmethod
    def signal(self, number: int) -> None:
        """Send SIGTERM or SIGUSR1 to the job's processes. They save a checkpoint and end; the job is not requeued.

        Raises:
            Unreachable: the engine does not answer.
        """

    @abstractmethod
    def cancel(self) -> None:
        """End the job at once, or take it out of the queue.

        Raises:
            Unreachable: the engine does not answer.
        """

    def release(self) -> None:
        """Let a held job start.

        Raises:
            Unreachable: the engine does not answer.
        """
        self.held = False

    def hurry(self) -> None:
        """A second Ctrl-C while :meth:`cancel` is at work: what it waits for is not waited for."""

    def end_is_shown(self) -> None:
        """Note that a command has shown the job's end: the same command is another job from now on."""


@dataclass(frozen=True)
class Living:
    """A job that an earlier command has submitted for the same folder, and of which no command has shown the end.

    Attributes:
        words: flags and overrides of that command. folder: of the run, or of the sweep.
        points: the jobs of a sweep by number. leaves: it ends at the moment, or was asked to. is_over: it has ended.
        is_done: it has ended without an error, and nothing has run in its folders since: each time its end is shown.
    """

    handle: Handle
    words: tuple[str, ...]
    folder: Path
    points: Mapping[int, Point] = field(default_factory=dict)
    leaves: bool = False
    is_over: bool = False
    is_done: bool = False


class Submitter(Launcher):
    """Base class of launchers that submit the command to an engine.

    Attributes:
        engine: the name of the engine, as it is in ``TRAINER_SUBMITTED``. schema: declares the keys of ``options``.
        runs_apart: it runs a job with :attr:`Job.copies`, whose hosts share no disk.
        freezes: it runs a job with the config that was composed at its submission.
        decides: keys that say where hosts are, which the engine decides, and what to type instead of each.
    """

    engine = ""
    runs_apart = False
    freezes = False
    decides: ClassVar[Mapping[str, str]] = {
        name: f"the command without launch.{name}, with launch.nnodes" for name in ("ips", "node_rank", "master_addr")
    }
    schema: type[SubmitLaunch] = SubmitLaunch
    options: SubmitLaunch

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.options = typed(self.schema, config)

    @property
    def submits(self) -> bool:
        """Whether this command is to be submitted; False inside of a job of the engine."""
        return os.environ.get(SUBMITTED) != self.engine

    def check_places(self) -> None:
        """Refuse keys that say where the hosts are.

        Raises:
            UserError: one of :attr:`decides` is set.
        """
        for name, instead in self.decides.items():
            if (value := getattr(self.options, name)) != getattr(self.schema, name):
                why = f"{self.engine} decides where the hosts are, and each of them finds itself"
                raise UserError(f"launch.{name}={value}", why, instead)

    def gpus_in_options(self, hosts: int) -> tuple[str, int] | None:
        """The option in ``launch.options`` by which the engine is asked for GPUs, and how many each host gets by it.

        Raises:
            UserError: it says no number.
        """
        return None

    def sees(self, folder: Path) -> bool:
        """Whether this machine has the run's folder, so that a run is refused here that it would refuse there."""
        return self.options.shared_storage

    def holds(self, folder: Path) -> bool:
        """Whether the run's folder is one of this machine, where a submission leaves its files."""
        return True

    def living(self, folders: Sequence[Path]) -> Living | None:
        """Return the job that lives for one of these engine folders, where two jobs would write the same files; else
        the one that was submitted for the first of them, if no command has shown its end.

        Raises:
            UserError: there may be one, and the engine does not answer.
        """
        return None

    @abstractmethod
    def render(self, job: Job) -> str:
        """Return the text that the engine gets, such as a batch script. Writes nothing, and asks no engine.

        Raises:
            UserError: the job asks for what this engine cannot do.
        """

    def concerns(self, job: Job) -> list[str]:
        """Return sentences on what the engine does with this job that the user may not expect. May ask the engine."""
        return []

    def printed(self, job: Job) -> str:
        """What the command prints instead of submitting the job; '': the job is submitted."""
        return self.render(job) if self.options.dry_run else ""

    @abstractmethod
    def submit(self, job: Job) -> Handle:
        """Hand the job to the engine.

        Raises:
            UserError: the engine refuses it, or is not there.
        """

    def start(self, assignment: Assignment, supervision: Supervision) -> dict[str, Any]:
        """Inside of the job: run this host's processes, as ``launch=local`` does."""
        from trainer.launch.builtin import Local

        return Local(**self.config).start(assignment, supervision)
