"""Runs the jobs of a sweep side by side, each in slots of this host, and shows how each begins and ends."""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli import sweep_table
from trainer.cli.commands import recorded_by
from trainer.cli.last_lines import INDENT, shown
from trainer.cli.submit import SWEEP_DIR, Commands
from trainer.cli.sweep_state import Next
from trainer.config.keys import key_of
from trainer.config.redact import command
from trainer.errors import BY_CTRL_C, PRUNED, AskedToLeave, Interrupted, RunPreempted, first_line
from trainer.host.engine_tasks import ENGINE
from trainer.job.result import Result, read_result
from trainer.launch.engines.engine_folder import LOG
from trainer.service.pool import End, Pool, Setup, SlotJob, shares
from trainer.service.queue import Slots
from trainer.service.runner import HARDER_S
from trainer.service.slots import of_this_host
from trainer.terminal.screen import Screen, say
from trainer.wording import counted

if TYPE_CHECKING:
    from trainer.cli.sweep_state import SweepState

POLL_S = 0.2
CONFIG_DIR = "--config-dir"


class Source(ABC):
    """What decides which jobs there are, and in which order they start."""

    total: int

    @abstractmethod
    def next(self) -> Next | None:
        """Return the job to start now; None: there is none, at least until another job ends."""

    @abstractmethod
    def ended(self, number: int, result: Result, folder: Path, died: bool) -> bool:
        """Note the end of a job; returns whether it is over, and not to be started again."""

    def is_enough(self, number: int, folder: Path) -> bool:
        """Whether a job that runs is to be ended now, by what it has measured so far."""
        return False

    def left_behind(self) -> list[Next]:
        """Return jobs that were to go on later, and do not."""
        return []

    def paused(self) -> list[Next]:
        """Return jobs that have stopped and may go on later."""
        return []


class EachOnce(Source):
    """The jobs of a grid, in their order.

    Args:
        left: the numbers of those that are not over.
    """

    def __init__(self, sweep: SweepState, left: Sequence[int]) -> None:
        self.sweep, self.left, self.total = sweep, list(left), len(sweep.points)

    def next(self) -> Next | None:
        if not self.left:
            return None
        number = self.left.pop(0)
        point = self.sweep.points[number]
        words = tuple(o for o in point.overrides if not key_of(o).startswith("sweep."))
        return Next(number, words, self.sweep.shown(point.overrides), point.subdir)

    def ended(self, number: int, result: Result, folder: Path, died: bool) -> bool:
        return True


def of_host(sweep: SweepState, parallel: int | None, host: Slots | None = None) -> list[Slots]:
    """The slots of each job of a sweep that runs at the same time; says where there are too few.

    Args:
        parallel: jobs at a time; None: as many as there are slots for.
    """
    host = of_this_host() if host is None else host
    ready = sweep.points[0].ready
    config, processes = ready.checked.config, ready.plan.topology.processes
    gpus = (config.launch.nproc or 1) if ready.checked.device == "cuda" else 0
    slots = shares(host, len(processes), gpus, parallel)
    if any(not one.cores for one in slots) or gpus * len(slots) > len(host.gpus) > 0:
        have = f"{counted(len(host.cores), 'core')}" + (f" and {counted(len(host.gpus), 'GPU')}" if gpus else "")
        say(f"ATTENTION: {len(slots)} jobs at a time share {have} (sweep.parallel=auto: as many as have their own)")
    return slots


def setup_of(sweep: SweepState) -> Setup:
    """What the processes of a sweep have to know before their first job."""
    flags = list(sweep.flags)
    named = {flag: flags[place + 1] for place, flag in enumerate(flags[:-1]) if flag.startswith("--")}
    return Setup(
        config_dir=named.get(CONFIG_DIR),
        config_name=sweep.config_name,
        overrides=sweep.overrides,
        flags=flags,
        swept=sorted(sweep.swept),
        trackers={**recorded_by(sweep.points[0].ready.checked.config)},
    )


class Parallel:
    """The jobs of a sweep at work.

    Args:
        slots: of each job that runs at the same time.
    """

    def __init__(self, sweep: SweepState, source: Source, slots: Sequence[Slots]) -> None:
        self.sweep, self.source, self.slots = sweep, source, slots
        self.jobs: dict[int, tuple[Next, float]] = {}
        self.stops = False

    def run(self) -> None:
        """Run the jobs to the end of the last one.

        Raises:
            RunPreempted, Interrupted: by a signal, which the jobs got as well; all have ended.
        """
        config = self.sweep.points[0].ready.checked.config
        with self.sweep.pool or Pool(self.slots, setup_of(self.sweep)) as pool:
            pool.warm(min(len(self.slots), self.source.total))
            self.sweep.wait_for_trackers()
            try:
                while self._start(pool) or pool.running:
                    for number, end in pool.ends(POLL_S):
                        self._ended(number, end)
                    self._end_bad_ones(pool)
                self._note(self.source.left_behind(), PRUNED)
            except (AskedToLeave, KeyboardInterrupt, Interrupted) as error:
                self._leave(pool, error, config.checkpoint.grace_s + HARDER_S)

    def _start(self, pool: Pool) -> bool:
        """Start jobs in all free slots; returns whether any was started."""
        some = False
        while not (pool.is_full or self.stops) and (job := self.source.next()) is not None:
            folder = self.sweep.folder / job.subdir
            log = folder / ENGINE / LOG
            pruned(folder).unlink(missing_ok=True)
            self.sweep.begins(job)
            pool.start(SlotJob(job.number, list(job.words), str(log), str(self.sweep.folder), job.subdir))
            self.jobs[job.number] = job, time.monotonic()
            how = "goes on" if (folder / "config.yaml").exists() else "begins"
            say(f"job {job.number} of {self.source.total} {how}: {command(job.shown)}   (log {shown(log)})")
            some = True
        return some

    def _ended(self, number: int, end: End) -> None:
        """Note and show the end of a job."""
        job, _ = self.jobs.pop(number)
        folder = self.sweep.folder / job.subdir
        result = Result(end.status, str(folder), error=end.error)
        if end.begun:
            result = replace(read_result(str(folder), end.status, end.error), run_dir=str(folder))
        if end.died and result.status != "done":  # what an earlier life has left is not its end
            result = replace(result, status=end.status, error=end.error)
        if not self.source.ended(number, result, folder, end.died):
            say(f"job {number} {'is started again: ' + first_line(Exception(end.error)) if end.died else 'waits'}")
            return
        row = self.sweep.row(job.shown, result)
        self.sweep.ended[number] = row
        self._show_end(number, row, folder)
        if result.status == "failed" and self.sweep.config.on_error == "stop":
            self.stops = True

    def _show_end(self, number: int, row: sweep_table.Row, folder: Path) -> None:
        result = row.result
        if result.status != "failed":
            values = "".join(f", {name} {value:.5f}" for name, value in row.values.items())
            say(f"job {number} {result.status} after {result.seconds:.1f} s{values}")
            return
        Screen().print(f"job {number} failed: {result.error}", style="bold red", soft_wrap=True)
        say(f"  its lines: {shown(folder / ENGINE / LOG)}")
        if self.sweep.config.on_error == "stop":
            say("sweep.on_error=stop: no other job is started")

    def _end_bad_ones(self, pool: Pool) -> None:
        """Ask jobs to end of which enough is known."""
        for number, process in pool.running.items():
            folder = self.sweep.folder / self.jobs[number][0].subdir
            if not pruned(folder).exists() and self.source.is_enough(number, folder):
                pruned(folder).parent.mkdir(parents=True, exist_ok=True)
                pruned(folder).touch()
                process.signal(signal.SIGTERM)

    def _note(self, jobs: Sequence[Next], status: str) -> None:
        """Note results of jobs that are not at work, with this status."""
        for job in jobs:
            folder = self.sweep.folder / job.subdir
            result = replace(read_result(str(folder), status, ""), status=status, run_dir=str(folder))
            self.sweep.ended[job.number] = self.sweep.row(job.shown, result)

    def _leave(self, pool: Pool, error: BaseException, within_s: float) -> None:
        """Pass a signal on to the jobs, and wait for their ends.

        Raises:
            RunPreempted, Interrupted: always.
        """
        asked = isinstance(error, AskedToLeave)
        why = str(error) or BY_CTRL_C
        say(f"{why}: {counted(len(pool.running), 'job')} that run end, and no other is started")
        for process in pool.running.values():
            process.signal(signal.SIGTERM if asked else signal.SIGINT)
        until = time.monotonic() + within_s
        self.stops = True
        while pool.running and time.monotonic() < until:
            for number, end in pool.ends(POLL_S):
                self._ended(number, end)
        for number in pool.running:
            self.sweep.ended[number] = self.sweep.row(self.jobs[number][0].shown, Result("killed", ""))
        self._note(self.source.paused(), sweep_table.PAUSED)
        cut = (RunPreempted if asked else Interrupted)(why)
        commands = Commands.of([*self.sweep.flags, *self.sweep.overrides], SWEEP_DIR, self.sweep.folder)
        cut.add_note(f"{'resume':<{INDENT}}{commands.resume}")
        raise cut from None


def pruned(folder: Path) -> Path:
    """The file that says that the job in this folder was ended by its sweep."""
    return folder / ENGINE / PRUNED
