"""A submitted job of Slurm, and a sweep as one array: asked for by scontrol and by the files of ``RUN/engine``."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from trainer.errors import Interrupted, RunPreempted
from trainer.host.engine_tasks import ENGINE
from trainer.launch.engines.contract import (
    ENDED,
    PENDING,
    REQUEUED,
    RUNNING,
    WITHOUT_FAULT,
    Handle,
    Point,
    State,
    Unreachable,
)
from trainer.launch.engines.engine_folder import LEAVE, LIVES, LOG, SHOWN, LogReader, last_lines, query, read_code
from trainer.launch.engines.slurm_concerns import explained, field
from trainer.launch.engines.slurm_script import EARLY

CODES = {"COMPLETED": 0, "CANCELLED": 130, "PREEMPTED": 75, "OUT_OF_MEMORY": 137}
"""Exit codes for how a job ends that does not say it itself."""
FORGOTTEN = "Invalid job id"
"""What scontrol says of a job that has ended some time ago."""
COMPLETED = "already completing or completed"
"""What scancel says of a job that ends, or has just ended."""
NOT_STARTED = State(ENDED, "not started", Interrupted.exit_code)
"""Of a job that was cancelled while it waited."""
LOST_TRACE = State(ENDED, "Slurm has forgotten it, and it left no exit code", 1)
CANCELLED = "A run that has begun saves a checkpoint, if it can within Slurm's KillWait"
WINDS_UP_S = 60.0
"""Slurm's KillWait, which is 30 s as a rule, and what it needs besides."""
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


class _OfSlurm(Handle):
    """What a job and an array of Slurm have in common."""

    cancelled, winds_up_s = CANCELLED, WINDS_UP_S
    number: str

    def release(self) -> None:
        query(["scontrol", "release", self.number])
        self.held = False

    def hurry(self) -> None:
        self.winds_up_s = 0.0


class SlurmJob(_OfSlurm):
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
            if FORGOTTEN not in str(error):
                raise
            code = read_code(self.folder)
            return LOST_TRACE if code is None else State(ENDED, "", code)

    def state_of(self, said: str) -> State:
        """The state of the job of which ``scontrol show job -o`` says this."""
        code = read_code(self.folder)
        word = field(said, "JobState")
        reason = "" if (found := field(said, "Reason")) in ("None", "") else found
        if word == "CANCELLED" and code is None and field(said, "NodeList") in ("", "(null)"):
            return NOT_STARTED
        if word in OVER:
            return State(ENDED, "" if code is not None else word.lower(), _code(word, said) if code is None else code)
        if code is not None:
            return State(ENDED, "", code)
        restarts = int(field(said, "Restarts") or 0)
        if word in ("PENDING", "REQUEUED") or (word == "COMPLETING" and 0 < restarts == self._lives()):
            return State(REQUEUED if restarts else PENDING, explained(reason, self.number))
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
        _cancel(self.number)

    def end_is_shown(self) -> None:
        _note_shown(self.folder)


class SlurmArray(_OfSlurm):
    """A sweep as one array of Slurm: its lines are the changes of state of its elements, and the last lines of those
    that fail.

    Args:
        folder: the sweep's engine folder. points: by the numbers of the elements.
    """

    def __init__(self, number: str, folder: Path, points: Mapping[int, Point]) -> None:
        self.number, self.folder, self.points = number, folder, points
        self.name, self.cancels = f"Slurm array {number}", f"scancel {number}"
        self.log = f"{folder}/N.log"
        self._elements = {i: SlurmJob(f"{number}_{i}", point.folder / ENGINE) for i, point in points.items()}
        self._logs = {
            i: one.folder / LOG if points[i].copies else folder / f"{i}.log" for i, one in self._elements.items()
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
        waiting = {i for text in by_element for i in _elements_of(text, self.points)}
        for i, element in self._elements.items():
            if line := by_element.get(str(i)):
                self._change(i, element.state_of(line))
            elif (code := read_code(element.folder)) is not None:
                self._change(i, State(ENDED, "", code))
            elif i not in waiting and self._states[i].phase != ENDED:
                self._change(i, self._without_trace(i))
        phases = [state.phase for state in self._states.values()]
        counts = {phase: phases.count(phase) for phase in (PENDING, REQUEUED, RUNNING, ENDED)}
        words = ", ".join(f"{count} {phase}" for phase, count in counts.items() if count)
        if counts[ENDED] == len(phases):
            return State(ENDED, "", self._code())
        if counts[RUNNING] or counts[ENDED]:
            return State(RUNNING, words)
        reasons = (field(line, "Reason") for line in said if field(line, "JobState") == "PENDING")
        reason = next((one for one in reasons if one not in ("", "None")), "")
        return State(PENDING, f"{words}: {explained(reason, self.number)}" if reason else words)

    def _without_trace(self, number: int) -> State:
        """The state of an element of which Slurm has no line: cancelled while it waited, or ended some time ago."""
        has_begun = self._states[number].phase != PENDING or self._logs[number].exists()
        return LOST_TRACE if has_begun else NOT_STARTED

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
        _cancel("--state=PENDING", self.number)
        _send(number, self.number)

    def cancel(self) -> None:
        self._leave()
        _cancel(self.number)

    def end_is_shown(self) -> None:
        for folder in (self.folder, *(element.folder for element in self._elements.values())):
            _note_shown(folder)

    def _leave(self) -> None:
        for element in self._elements.values():
            with suppress(OSError):
                (element.folder / LEAVE).touch()


def _elements_of(text: str, known: Iterable[int]) -> Iterator[int]:
    """The elements that wait, and have one line in common: ``2,4-5%2`` or ``0-10:2``. Of a line that Slurm has cut
    short (``1,3,...``) all may be meant; 4294967294 are those that were cancelled."""
    if "..." in text:
        yield from known
    for first, last, step in re.findall(r"(\d+)(?:-(\d+)(?::(\d+))?)?", text.partition("%")[0]):
        yield from range(int(first), int(last or first) + 1, int(step or 1))


def _note_shown(folder: Path) -> None:
    with suppress(OSError):
        (folder / SHOWN).touch()


def _send(number: int, job: str) -> None:
    """Send a signal to the tasks of a job or an array."""
    _cancel(f"--signal={signal.Signals(number).name.removeprefix('SIG')}", job)


def _cancel(*words: str) -> None:
    """Call scancel. That a job is over already is no error: its state says how it has ended.

    Raises:
        Unreachable: Slurm does not answer.
    """
    try:
        query(["scancel", *words])
    except Unreachable as error:
        if FORGOTTEN not in str(error) and COMPLETED not in str(error):
            raise


def _code(word: str, said: str) -> int:
    """The exit code for a job that left none: Slurm's, or that of the way it ended."""
    code, _, number = field(said, "ExitCode").partition(":")
    if word in CODES:
        return CODES[word]
    return int(code or 0) or (128 + int(number) if number.isdecimal() and int(number) else 1)
