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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from trainer.errors import RunPreempted, UserError
from trainer.host.engine_tasks import SLURM
from trainer.launch.engines.contract import (
    ENDED,
    ENGINE,
    PENDING,
    REQUEUED,
    RUNNING,
    WITHOUT_FAULT,
    Handle,
    Job,
    Living,
    State,
    Submitter,
    Unreachable,
)
from trainer.launch.engines.engine_folder import (
    LEAVE,
    LIVES,
    LOG,
    LogReader,
    SubmittedJob,
    ask,
    begin,
    last_lines,
    left_if_submitted,
    query,
    read_code,
)
from trainer.launch.engines.slurm_concerns import concerns, explained, field
from trainer.launch.engines.slurm_script import DRAWN, EARLY, rendered
from trainer.planning.run_secret import LEAST

CODES = {"COMPLETED": 0, "CANCELLED": 130, "PREEMPTED": 75, "OUT_OF_MEMORY": 137}
"""Exit codes for how a job ends that does not say it itself."""
FORGOTTEN = "Invalid job id"
"""What scontrol says of a job that has ended some time ago."""
CANCELLED = "A run that has begun saves a checkpoint, if it can within Slurm's KillWait"
LAST_LINES = 12
"""Lines of the log of a sweep's failed job that are shown."""
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
        text = self.render(job).replace(shlex.quote(DRAWN), secrets.token_hex(LEAST))
        of_points = [point.folder / ENGINE for point in job.points]
        with left_if_submitted([job.engine_folder, *of_points]):
            script = begin(job, text)
            for folder in of_points:
                folder.mkdir(parents=True, exist_ok=True)
            number = ask(["sbatch", "--parsable", str(script)], "launch=slurm").strip().partition(";")[0]
        SubmittedJob(self.engine, number, job.words).write(job.engine_folder)
        for element, point in job.numbered.items():
            SubmittedJob(self.engine, f"{number}_{element}", point.words).write(point.folder / ENGINE)
        return SlurmArray(number, job) if job.points else SlurmJob(number, job.engine_folder)

    def living(self, folders: Sequence[Path]) -> Living | None:
        for folder in folders:
            before = SubmittedJob.of(folder)
            if before is None or before.engine != self.engine:
                continue
            handle = SlurmJob(before.number, folder)
            try:
                said = query(["scontrol", "show", "job", before.number, "-o"]).splitlines()
            except Unreachable as error:
                if FORGOTTEN in str(error):
                    continue
                why = f"{handle.name} may still run in this folder, and Slurm does not answer: {error}"
                raise UserError("launch=slurm", why, "the same command again") from error
            if states := {field(line, "JobState") for line in said} - {*OVER}:
                return Living(handle, before.words, states == {"COMPLETING"} or (folder / LEAVE).exists())
        return None


class SlurmJob(Handle):
    """A submitted job of Slurm. Its state is asked of ``scontrol``; of a job that Slurm has forgotten, or whose end it
    calls otherwise, the file ``code`` counts."""

    cancelled = CANCELLED

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
    """A sweep as one array of Slurm: its lines are the changes of state of its elements, and the last lines of those
    that fail."""

    cancelled = CANCELLED

    def __init__(self, number: str, job: Job) -> None:
        self.number, self.points = number, job.numbered
        self.name, self.cancels = f"Slurm array {number}", f"scancel {number}"
        self.log = f"{job.engine_folder}/N.log"
        self._elements = {i: SlurmJob(f"{number}_{i}", point.folder / ENGINE) for i, point in self.points.items()}
        self._logs = {
            i: one.folder / LOG if job.copies else job.engine_folder / f"{i}.log" for i, one in self._elements.items()
        }
        self._states = dict.fromkeys(self.points, State(PENDING))
        self._said: list[str] = []
        self._leaves = False

    def state(self) -> State:
        try:
            said = query(["scontrol", "show", "job", self.number, "-o"]).splitlines()
        except Unreachable as error:
            if FORGOTTEN not in str(error):
                raise
            said = []
        by_element = {field(line, "ArrayTaskId"): line for line in said}
        for i, element in self._elements.items():
            if line := by_element.get(str(i)):  # those that wait have one line in common
                self._change(i, element.state_of(line))
            elif (code := read_code(element.folder)) is not None:
                self._change(i, State(ENDED, "", code))
        phases = [state.phase for state in self._states.values()]
        counts = {phase: phases.count(phase) for phase in (PENDING, REQUEUED, RUNNING, ENDED)}
        words = ", ".join(f"{count} {phase}" for phase, count in counts.items() if count)
        if counts[ENDED] == len(phases):
            return State(ENDED, "", self._code())
        return State(RUNNING if counts[RUNNING] or counts[ENDED] else PENDING, words)

    def _code(self) -> int:
        codes = {i: state.code for i, state in self._states.items()}
        failed = {i: code for i, code in codes.items() if code not in WITHOUT_FAULT}
        if failed:
            self.log = str(self._logs[min(failed)])
        if self._leaves and any(codes.values()):
            return RunPreempted.exit_code
        return max(failed.values()) if failed else max(codes.values())

    def _change(self, number: int, state: State) -> None:
        if state == self._states[number]:
            return
        self._states[number] = state
        said = f"job {number} ({self.points[number].name}): {state}"
        if state.phase == ENDED and state.code not in WITHOUT_FAULT:
            log = self._logs[number]
            said = f"{said}. The end of {log}:\n{last_lines(log, LAST_LINES)}".rstrip()
        self._said.append(f"{said}\n")

    def lines(self) -> Iterator[str]:
        said, self._said = self._said, []
        yield from said

    def signal(self, number: int) -> None:
        self._leave()
        self._leaves = True
        query(["scancel", "--state=PENDING", self.number])
        _send(number, self.number)

    def cancel(self) -> None:
        self._leave()
        query(["scancel", self.number])

    def _leave(self) -> None:
        for element in self._elements.values():
            with suppress(OSError):
                (element.folder / LEAVE).touch()


def _send(number: int, job: str) -> None:
    """Send a signal to the tasks of a job or an array."""
    query(["scancel", f"--signal={signal.Signals(number).name.removeprefix('SIG')}", job])


def _code(word: str, said: str) -> int:
    """The exit code for a job that left none: Slurm's, or that of the way it ended."""
    code, _, number = field(said, "ExitCode").partition(":")
    if word in CODES:
        return CODES[word]
    return int(code or 0) or (128 + int(number) if number.isdecimal() and int(number) else 1)
