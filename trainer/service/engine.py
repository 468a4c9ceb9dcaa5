"""launch=queue: the command waits in the queue of this machine until there are slots for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.config.schema.run import QueueLaunch
from trainer.errors import UserError
from trainer.host.engine_tasks import SWEEP_DIR, SWEPT
from trainer.launch.engines.contract import (
    ENDED,
    ENGINE,
    PENDING,
    REQUEUED,
    RUNNING,
    Handle,
    Job,
    Living,
    Point,
    State,
    Submitter,
)
from trainer.launch.engines.engine_folder import LOG, LogReader, SubmittedJob, memory_of, shell_words
from trainer.service import queue, runner
from trainer.service.queue import Run

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
PHASES = {queue.QUEUED: PENDING, queue.PREEMPTED: REQUEUED, queue.STARTING: RUNNING, queue.RUNNING: RUNNING}
IDLE_S = 60.0
"""A runner that a submission has started ends after so long with nothing to do."""


class LocalQueue(Submitter):
    """launch=queue: a run of this host, started by its runner when its slots are free."""

    engine = runner.ENGINE_NAME
    schema = QueueLaunch
    options: QueueLaunch

    def render(self, job: Job) -> str:
        """The rows for the queue, a line each."""
        rows = self._rows(job)
        return "".join(
            f"{row['gpus']} GPUs, {row['cores']} cores, {row['memory'] >> 20} MiB, priority {row['priority']}: "
            f"python -m trainer {shell_words(row['words'])}\n"
            for row in rows
        )

    def submit(self, job: Job) -> Handle:
        rows = self._rows(job)
        for row in rows:
            folder = Path(row["folder"], ENGINE)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "code").unlink(missing_ok=True)
        the_queue = queue.Queue()
        numbers = the_queue.add(rows)
        for row, number in zip(rows, numbers, strict=True):
            SubmittedJob(self.engine, str(number), tuple(row["words"])).write(Path(row["folder"], ENGINE))
        if self.options.runner:
            start_runner(the_queue.folder)
        if job.points:
            return QueuedSweep(the_queue, numbers, job)
        return QueuedRun(the_queue, numbers[0])

    def living(self, folders: Sequence[Path]) -> Living | None:
        for folder in folders:
            before = SubmittedJob.of(folder)
            if before is None or before.engine != self.engine:
                continue
            the_queue = queue.Queue()
            run = the_queue.run(int(before.number))
            if run is not None and run.state not in queue.OVER and run.folder == str(folder.parent):
                asked_to_end = run.asked in (queue.CANCEL, queue.LEAVE)
                return Living(QueuedRun(the_queue, run.number), before.words, asked_to_end)
        return None

    def _rows(self, job: Job) -> list[dict[str, Any]]:
        if job.hosts > 1:
            why = "a run of several hosts needs an engine that has them: the queue is that of this host"
            raise UserError(f"launch.nnodes={job.hosts}", why, "launch.nnodes=1, or launch=slurm")
        job.refuse_range("the queue is that of this host")
        if job.setup:
            raise UserError("launch.setup", "is for engines with a batch script", "~launch.setup")
        number, unit = memory_of(job.needs.memory) if job.needs.memory else ("0", "K")
        processes = (job.workers or 1) + job.servers
        common = {
            "name": job.name,
            "command": list(job.command),
            "started_in": job.started_in,
            "priority": self.options.priority,
            "cores": job.needs.cores or self._cores(processes),
            "gpus": job.needs.gpus or 0,
            "memory": int(float(number) * UNITS[unit]),
            "grace_s": job.grace_s,
            "max_preemptions": job.max_preemptions,
            "max_lost": job.max_restarts,
        }
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TRAINER_RUNNER")}
        if not job.points:
            row = {"key": self.options.key, "environment": environment, "words": list(job.words)}
            return [{**common, **row, **_place(job.folder)}]
        environment |= {SWEEP_DIR: str(job.folder), SWEPT: ",".join(job.swept)}
        return [
            {
                **common,
                **_place(point.folder),
                "name": point.name,
                "words": list(point.words),
                "environment": environment,
                "sweep": 0,
                "parallel": job.parallel,
            }
            for point in job.points
        ]

    def _cores(self, processes: int) -> int:
        """The cores of a run that names none: one for each process, within this host's."""
        return min(processes, len(os.sched_getaffinity(0)))


def _place(folder: Path) -> Mapping[str, str]:
    return {"folder": str(folder), "log": str(folder / ENGINE / LOG)}


def start_runner(folder: Path) -> None:
    """Start this host's runner, unless there is one."""
    if (lock := runner.only_one(folder)) is None:
        return
    os.close(lock)
    with (folder / "runner.log").open("ab") as log:
        subprocess.Popen(  # ourselves  # nosec B603
            [sys.executable, "-m", "trainer", "runner", "--idle", str(IDLE_S)],
            env={**os.environ, queue.HOME: str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=folder,
        )


class QueuedRun(Handle):
    """A run in the queue."""

    cancelled = "A run that has begun saves a checkpoint first"

    def __init__(self, the_queue: queue.Queue, number: int) -> None:
        self.queue, self.number = the_queue, number
        run = self._run()
        self.name, self.cancels, self.log = f"run {number}", f"python -m trainer cancel {number}", run.log
        self._reader = LogReader(Path(run.log))

    def _run(self) -> Run:
        run = self.queue.run(self.number)
        assert run is not None, "rows are not removed while a command follows them"
        return run

    def state(self) -> State:
        return state_of(self._run())

    def lines(self) -> Iterator[str]:
        return self._reader.lines()

    def signal(self, number: int) -> None:
        self.queue.move(self.number, (*queue.WAITING, *queue.ALIVE), asked=queue.LEAVE)

    def cancel(self) -> None:
        self.queue.move(self.number, (*queue.WAITING, *queue.ALIVE), asked=queue.CANCEL)


class QueuedSweep(Handle):
    """The runs of a sweep in the queue: its lines are their changes of state."""

    cancelled = QueuedRun.cancelled

    def __init__(self, the_queue: queue.Queue, numbers: Sequence[int], job: Job) -> None:
        self.runs = {number: QueuedRun(the_queue, number) for number in numbers}
        self.points: dict[int, Point] = dict(zip(numbers, job.points, strict=True))
        span = f"{numbers[0]}-{numbers[-1]}"
        self.name, self.cancels, self.log = (
            f"runs {span}",
            f"python -m trainer cancel {span}",
            f"{job.folder}/*/engine/log",
        )
        self._states = dict.fromkeys(numbers, State(PENDING))
        self._said: list[str] = []

    def state(self) -> State:
        for number, run in self.runs.items():
            if (state := run.state()) != self._states[number]:
                self._states[number] = state
                self._said.append(f"run {number} ({self.points[number].name}): {state}\n")
        phases = [state.phase for state in self._states.values()]
        counts = {phase: phases.count(phase) for phase in (PENDING, REQUEUED, RUNNING, ENDED)}
        if counts[ENDED] == len(phases):
            return State(ENDED, "", max(state.code for state in self._states.values()))
        words = ", ".join(f"{count} {phase}" for phase, count in counts.items() if count)
        return State(RUNNING if counts[RUNNING] or counts[ENDED] else PENDING, words)

    def lines(self) -> Iterator[str]:
        said, self._said = self._said, []
        yield from said

    def signal(self, number: int) -> None:
        for run in self.runs.values():
            run.signal(number)

    def cancel(self) -> None:
        for run in self.runs.values():
            run.cancel()


def state_of(run: Run) -> State:
    """Return the state of a run as that of an engine's job."""
    if run.state in PHASES:
        return State(PHASES[run.state], run.reason)
    code = run.code
    with suppress(OSError, ValueError):
        code = int(Path(run.folder, ENGINE, "code").read_text())
    return State(ENDED, run.reason, 1 if code is None else code)
