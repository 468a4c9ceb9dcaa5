"""launch=slurm: the command as a batch job of Slurm, which is requeued until it has ended.

The batch script runs one task on each host, the launcher of that host, and decides what the end of the tasks means:

- Host 0's task has ended, and another host is silent for ``checkpoint.grace_s`` more: that host is lost. The job is
  requeued without it, at most ``launch.max_restarts`` times.
- Exit code 75 of host 0: pre-empted, or out of time (SIGUSR1 comes before). The job is requeued, at most
  ``launch.max_preemptions`` times, and ``resume=auto`` continues the run.
- Exit code 75 after this command was asked to leave (``engine/leave``): the job ends with 75.
- Exit code 75 after somebody has cancelled the job (scancel in another shell): the job ends with 130.
- Another exit code: the job ends with it.

The number of one element of an array is that of the whole array as well. So an element calls itself ARRAY_ELEMENT.

Without a disk that the hosts share, the script and its tasks keep their files in folders of their hosts, and copy them
to the address ``checkpoint.to`` (:mod:`trainer.launch.engines.copies`), from where lives and exit codes come back.

Slurm takes a job that ends inside of its grace period for failed. So the script asks for the requeue itself, and then
waits until Slurm ends it. Files of a job in ``RUN/engine``: ``job.sh``, ``secret`` (0600), ``log``, ``host.N.log``,
``ended.LIFE.HOST`` (exit code of a task), ``lives`` (a line per life: number, exit code, lost hosts) and ``code`` (exit
code of the job). After some minutes Slurm forgets a job; then ``code`` says how it ended.
"""

from __future__ import annotations

import secrets
import shlex
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trainer.host.engine_tasks import SLURM
from trainer.launch.engines.contract import (
    ENDED,
    ENGINE,
    PENDING,
    REQUEUED,
    RUNNING,
    Handle,
    Job,
    State,
    Submitter,
    Unreachable,
)
from trainer.launch.engines.engine_folder import LEAVE, LIVES, LOG, LogReader, ask, begin, clear, query, read_code
from trainer.launch.engines.slurm_concerns import concerns, explained, field
from trainer.launch.engines.slurm_script import DRAWN, EARLY, rendered
from trainer.planning.run_secret import LEAST

CODES = {"COMPLETED": 0, "CANCELLED": 130, "PREEMPTED": 75, "OUT_OF_MEMORY": 137}
"""Exit codes for how a job ends that does not say it itself."""
FORGOTTEN = "Invalid job id"
"""What scontrol says of a job that has ended some time ago."""
OVER = (
    "COMPLETED",
    "CANCELLED",
    "FAILED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
)


class Slurm(Submitter):
    """launch=slurm: sbatch's own options are ``launch.options``."""

    engine = SLURM
    runs_apart = True

    def render(self, job: Job) -> str:
        return rendered(job)

    def concerns(self, job: Job) -> list[str]:
        return concerns(job)

    def submit(self, job: Job) -> Handle:
        script = begin(job, self.render(job).replace(shlex.quote(DRAWN), secrets.token_hex(LEAST)))
        for point in job.points:
            clear(point.folder / ENGINE)
        number = ask(["sbatch", "--parsable", str(script)], "launch=slurm").strip().partition(";")[0]
        return SlurmArray(number, job) if job.points else SlurmJob(number, job.engine_folder)


class SlurmJob(Handle):
    """A submitted job of Slurm. Its state is asked of ``scontrol``; of a job that Slurm has forgotten, or whose end it
    calls otherwise, the file ``code`` counts."""

    def __init__(self, number: str, folder: Path) -> None:
        self.number, self.folder = number, folder
        self.name, self.cancels, self.log = f"Slurm job {number}", f"scancel {number}", str(self.folder / LOG)
        self.early = f"{EARLY.replace('%j', number)} on its first host"
        self._reader = LogReader(self.folder / LOG)

    def state(self) -> State:
        try:
            return self.state_of(query(["scontrol", "show", "job", self.number, "-o"]))
        except Unreachable as error:
            if FORGOTTEN not in str(error) or (code := read_code(self.folder)) is None:
                raise
            return State(ENDED, "", code)

    def state_of(self, said: str) -> State:
        """The state of the job of which ``scontrol show job -o`` says this."""
        code = read_code(self.folder)
        word = field(said, "JobState")
        reason = "" if (found := field(said, "Reason")) in ("None", "") else found
        if word in OVER:
            return State(ENDED, "" if code is not None else word.lower(), _code(word, said) if code is None else code)
        if code is not None:
            return State(ENDED, "", code)
        restarts = int(field(said, "Restarts") or 0)
        if word in ("PENDING", "REQUEUED") or (word == "COMPLETING" and 0 < restarts == self._lives()):
            return State(REQUEUED if restarts else PENDING, explained(reason))
        return State(RUNNING, field(said, "NodeList"))

    def _lives(self) -> int:
        """How many lives of the job have ended."""
        with suppress(OSError):
            return len((self.folder / LIVES).read_text().splitlines())
        return 0

    def lines(self) -> Iterator[str]:
        return self._reader.lines()

    def signal(self, number: int) -> None:
        (self.folder / LEAVE).touch()
        _send(number, self.number)

    def cancel(self) -> None:
        with suppress(OSError):
            (self.folder / LEAVE).touch()
        query(["scancel", self.number])


class SlurmArray(Handle):
    """A sweep as one array of Slurm: its lines are the changes of state of its elements."""

    def __init__(self, number: str, job: Job) -> None:
        self.number, self.points = number, job.points
        self.name, self.cancels = f"Slurm array {number}", f"scancel {number}"
        self.log = f"{job.engine_folder}/N.log"
        self._elements = [SlurmJob(f"{number}_{i}", point.folder / ENGINE) for i, point in enumerate(job.points)]
        self._states = [State(PENDING)] * len(job.points)
        self._said: list[str] = []

    def state(self) -> State:
        try:
            said = query(["scontrol", "show", "job", self.number, "-o"]).splitlines()
        except Unreachable as error:
            if FORGOTTEN not in str(error):
                raise
            said = []
        by_element = {field(line, "ArrayTaskId"): line for line in said}
        for i, element in enumerate(self._elements):
            if line := by_element.get(str(i)):  # those that wait have one line in common
                self._change(i, element.state_of(line))
            elif (code := read_code(element.folder)) is not None:
                self._change(i, State(ENDED, "", code))
        phases = [state.phase for state in self._states]
        counts = {phase: phases.count(phase) for phase in (PENDING, REQUEUED, RUNNING, ENDED)}
        words = ", ".join(f"{count} {phase}" for phase, count in counts.items() if count)
        if counts[ENDED] == len(phases):
            return State(ENDED, "", max(state.code for state in self._states))
        return State(RUNNING if counts[RUNNING] or counts[ENDED] else PENDING, words)

    def _change(self, number: int, state: State) -> None:
        if state != self._states[number]:
            self._states[number] = state
            self._said.append(f"job {number} ({self.points[number].name}): {state}\n")

    def lines(self) -> Iterator[str]:
        said, self._said = self._said, []
        yield from said

    def signal(self, number: int) -> None:
        for element in self._elements:
            element.folder.mkdir(parents=True, exist_ok=True)
            (element.folder / LEAVE).touch()
        query(["scancel", "--state=PENDING", self.number])
        _send(number, self.number)

    def cancel(self) -> None:
        query(["scancel", self.number])


def _send(number: int, job: str) -> None:
    """Send a signal to the tasks of a job or an array."""
    query(["scancel", f"--signal={signal.Signals(number).name.removeprefix('SIG')}", job])


def _code(word: str, said: str) -> int:
    """The exit code for a job that left none: Slurm's, or that of the way it ended."""
    code, _, number = field(said, "ExitCode").partition(":")
    if word in CODES:
        return CODES[word]
    return int(code or 0) or (128 + int(number) if number.isdecimal() and int(number) else 1)
