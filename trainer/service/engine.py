"""launch=queue: the command waits in the queue until there are slots for it."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainer.config.schema.run import QueueLaunch
from trainer.errors import UserError
from trainer.host.code_version import code_version
from trainer.host.engine_tasks import ENGINE, SWEEP_DIR, SWEPT
from trainer.launch.engines.contract import (
    ENDED,
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
from trainer.launch.engines.engine_folder import CODE, LOG, SHOWN, LogReader, SubmittedJob, memory_of, shell_words
from trainer.launch.engines.submission import outside_of_tasks
from trainer.planning.run_secret import LEAST, VARIABLE
from trainer.service import queue, runner, slots
from trainer.service.queue import Run, Submission

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
PHASES = {queue.QUEUED: PENDING, queue.PREEMPTED: REQUEUED, queue.STARTING: RUNNING, queue.RUNNING: RUNNING}
IDLE_S = 60.0
"""A runner that a submission has started ends after so long with nothing to do."""


class LocalQueue(Submitter):
    """launch=queue: a run of this host, started by its runner when its slots are free."""

    engine = queue.OWN
    freezes = True
    schema = QueueLaunch
    options: QueueLaunch

    def render(self, job: Job) -> str:
        """The rows for the queue, a line each."""
        return "".join(
            f"{run.gpus} GPUs, {run.cores} cores, {run.memory >> 20} MiB, priority {run.priority}: "
            f"python -m trainer {shell_words(run.words)}\n"
            for run in self._runs(job)
        )

    def submit(self, job: Job) -> Handle:
        runs = self._runs(job)
        the_queue = queue.Queue()
        if self.options.once and (before := the_queue.with_key(self.options.once)) is not None:
            print(f"key {self.options.once} is run {before.number} already, in {before.folder}: {before.state}")
            return QueuedRun(the_queue, before.number)
        folders = [Path(run.folder, ENGINE) for run in runs]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / CODE).unlink(missing_ok=True)
        numbers = the_queue.add(runs)
        for folder, run, number in zip(folders, runs, numbers, strict=True):
            SubmittedJob(self.engine, str(number), tuple(run.words)).write(folder)
        if self.options.runner:
            start_runner(the_queue.folder)
        if not job.points:
            return QueuedRun(the_queue, numbers[0])
        (job.engine_folder / SHOWN).unlink(missing_ok=True)
        SubmittedJob(self.engine, f"{numbers[0]}-{numbers[-1]}", job.words, job.numbered).write(job.engine_folder)
        return QueuedSweep(the_queue, dict(zip(numbers, job.points, strict=True)), job.engine_folder)

    def living(self, folders: Sequence[Path]) -> Living | None:
        for folder in folders:
            before = SubmittedJob.of(folder)
            if before is None or before.engine != self.engine:
                continue
            the_queue = queue.Queue()
            if before.points:
                if (sweep := _living_sweep(the_queue, before, folder)) is not None:
                    return sweep
                continue
            run = the_queue.run(int(before.number))
            if run is not None and run.state not in queue.OVER and run.folder == str(folder.parent):
                asked_to_end = run.asked in (queue.CANCEL, queue.LEAVE)
                return Living(QueuedRun(the_queue, run.number), before.words, folder.parent, {}, asked_to_end)
        return None

    def concerns(self, job: Job) -> list[str]:
        run = self._runs(job)[0]
        hosts = queue.hosts_there() or {queue.this_host(queue.home()): slots.of_this_host()}
        if len(slots.fitting(hosts, run)) >= run.hosts:
            return []
        return [f"it waits until there are slots for it: {slots.never(hosts, run)}"]

    def _runs(self, job: Job) -> list[Submission]:
        job.refuse_range("the queue gives a run all of its hosts at once")
        if job.hosts > 1 and not queue.is_shared(queue.home()) and len(queue.hosts_there()) < job.hosts:
            why = f"the queue has one host: {queue.HOME}={queue.home()} is on a disk of this machine"
            instead = f"{queue.HOME}=FOLDER on a disk that the hosts share, with a runner on each; or launch=slurm"
            raise UserError(f"launch.nnodes={job.hosts}", why, instead)
        if job.setup:
            raise UserError("launch.setup", "is for engines with a batch script", "~launch.setup")
        number, unit = memory_of(job.needs.memory) if job.needs.memory else ("0", "K")
        environment = outside_of_tasks()
        if job.hosts > 1:
            environment.setdefault(VARIABLE, secrets.token_hex(LEAST))
        whole = Submission(
            name=job.name,
            folder=str(job.folder),
            log=str(job.engine_folder / LOG),
            words=list(job.words),
            command=list(job.command),
            started_in=job.started_in,
            environment=environment,
            config=job.frozen,
            user=queue.user(),
            code_version=code_version(job.started_in),
            key=self.options.once,
            priority=self.options.priority,
            hosts=job.hosts,
            cores=job.needs.cores or self._cores(job),
            gpus=job.needs.gpus or 0,
            memory=int(float(number) * UNITS.get(unit, 1)),
            grace_s=job.grace_s,
            max_preemptions=job.max_preemptions,
            max_lost=job.max_restarts,
        )
        if not job.points:
            return [whole]
        of_sweep = {**environment, SWEEP_DIR: str(job.folder), SWEPT: ",".join(job.swept)}
        return [
            replace(
                whole,
                name=point.name,
                folder=str(point.folder),
                log=str(point.folder / ENGINE / LOG),
                words=list(point.words),
                environment=of_sweep,
                config=point.frozen,
                key=None,
                sweep=0,
                parallel=job.parallel,
            )
            for point in job.points
        ]

    def _cores(self, job: Job) -> int:
        """The cores on a host of a run that names none: one for each process there, within this host's."""
        processes = (job.workers or job.hosts) + job.servers
        return min(-(-processes // job.hosts), len(os.sched_getaffinity(0)))


def _living_sweep(the_queue: queue.Queue, submitted: SubmittedJob, folder: Path) -> Living | None:
    """A sweep whose runs live, or whose end is shown; None: neither, or the runs are of another queue.

    Args:
        folder: the sweep's engine folder.
    """
    points, first = submitted.points, int(submitted.number.partition("-")[0])
    runs = dict(zip(points, the_queue.between(first, first + len(points) - 1), strict=False))
    if [run.folder for run in runs.values()] != [str(point.folder) for point in points.values()]:
        return None
    handle = QueuedSweep(the_queue, {runs[job].number: point for job, point in points.items()}, folder)
    found = Living(handle, submitted.words, folder.parent, points)
    if asked := [run.asked for run in runs.values() if run.state not in queue.OVER]:
        return replace(found, leaves=all(one in (queue.CANCEL, queue.LEAVE) for one in asked))
    last = {job: SubmittedJob.of(point.folder / ENGINE) for job, point in points.items()}
    is_done = all(run.state == queue.DONE and _is_of(last[job], run) for job, run in runs.items())
    return replace(found, is_over=True, is_done=is_done) if is_done or not (folder / SHOWN).exists() else None


def _is_of(submitted: SubmittedJob | None, run: Run) -> bool:
    """Whether a folder's last job is this run: nothing has run there since."""
    return submitted is not None and (submitted.engine, submitted.number) == (queue.OWN, str(run.number))


def start_runner(folder: Path) -> None:
    """Start this host's runner, unless there is one."""
    if (lock := runner.only_one(folder)) is None:
        return
    os.close(lock)
    with (folder / "runner.log").open("ab") as log:
        subprocess.Popen(  # ourselves  # nosec B603
            [sys.executable, "-m", "trainer", "runner", "--idle", str(IDLE_S)],
            env={**outside_of_tasks(), queue.HOME: str(folder)},
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
        self.follows = f"python -m trainer logs -f {number}"
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
    """The runs of a sweep in the queue: its lines are their changes of state.

    Args:
        points: by the number of their run. folder: of the sweep's engine files.
    """

    cancelled = QueuedRun.cancelled

    def __init__(self, the_queue: queue.Queue, points: Mapping[int, Point], folder: Path) -> None:
        self.runs = {number: QueuedRun(the_queue, number) for number in points}
        self.points, self.folder, span = points, folder, f"{min(points)}-{max(points)}"
        self.name, self.cancels = f"runs {span}", f"python -m trainer cancel {span}"
        self.log = f"{folder.parent}/*/engine/log"
        self._states = dict.fromkeys(points, State(PENDING))
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

    def end_is_shown(self) -> None:
        (self.folder / SHOWN).touch()


def state_of(run: Run) -> State:
    """Return the state of a run as that of an engine's job."""
    if run.state in PHASES:
        return State(PHASES[run.state], run.reason)
    return State(ENDED, run.reason, 1 if run.code is None else run.code)
