"""The processes that run the jobs of one sweep side by side: each has slots of its own, and runs one job after another.

A job that ran in a process of its own would begin with imports of several seconds. A slot process has made them once::

    started --> ready --> at work --> ready ... --> ended (its input is closed)
                             |
                             '-- died: the job has ended with it, and another process takes its place

The pool writes each job as a line of JSON to the process, and reads a line for each end. A signal to a process is for
its job; without a job the process ignores it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import connection
from typing import Any

from trainer.errors import RunFailed
from trainer.host.signals import signal_name
from trainer.service.queue import Slots

MODULE = "trainer.cli.sweep_slot"
LINE = 65536
"""Bytes of answers that are read at once."""
ENDS_S = 10.0
"""Longest wait for the end of a process without a job."""


def shares(host: Slots, processes: int, gpus: int, parallel: int | None) -> list[Slots]:
    """Divide a host's slots among the jobs that run at the same time.

    Args:
        processes: of a job. gpus: of a job; 0: it uses none. parallel: jobs at a time; None: as many as there are
        slots for.

    Returns:
        The slots of each job. Where there are too few, a share is empty, or jobs share GPUs.
    """
    most = len(host.gpus) // gpus if gpus else len(host.cores) // processes
    count = parallel or max(1, most)
    each = len(host.cores) // count
    cores = [host.cores[n * each : (n + 1) * each] if each >= processes else () for n in range(count)]
    return [
        Slots(cores[n], tuple(host.gpus[(n * gpus + i) % len(host.gpus)] for i in range(gpus)) if host.gpus else ())
        for n in range(count)
    ]


@dataclass(frozen=True)
class Setup:
    """A sweep, as a slot process gets it.

    Attributes:
        config_dir, config_name: where Hydra finds the config. overrides, flags: of the command of the sweep.
        swept: keys in which jobs differ. trackers: nodes of ``tracking.trackers``, by name.
    """

    config_dir: str | None
    config_name: str
    overrides: list[str]
    flags: list[str]
    swept: list[str]
    trackers: dict[str, Any]


@dataclass(frozen=True)
class SlotJob:
    """A job, as a slot process gets it.

    Attributes:
        number: in the sweep. words: its overrides. log: the file for its lines. folder: of the sweep. subdir: the job's
        folder in it. A slot process would name another folder than the sweep if the name has the time in it.
    """

    number: int
    words: list[str]
    log: str
    folder: str
    subdir: str


@dataclass(frozen=True)
class End:
    """How a job has ended.

    Attributes:
        status: as of a result. error: what went wrong. begun: it had its folder. died: with its process.
    """

    status: str
    error: str = ""
    begun: bool = True
    died: bool = False


class SlotProcess:
    """One slot process.

    Attributes:
        job: the number of the job that it runs; None: it has none. is_new: it has had none yet.
    """

    def __init__(self, slots: Slots, setup: Setup) -> None:
        self.job: int | None = None
        self.is_new = True
        self.screen = tempfile.TemporaryFile()  # what it prints outside of jobs  # noqa: SIM115
        self.answers, its = os.pipe()
        self._read = b""
        own = {"CUDA_VISIBLE_DEVICES": ",".join(slots.gpus)} if slots.gpus else {}
        try:
            self.process = subprocess.Popen(  # this interpreter with this package's module; no shell  # nosec B603
                [sys.executable, "-m", MODULE, str(os.getpid()), str(its), ",".join(map(str, slots.cores))],
                env={**os.environ, **own},
                stdin=subprocess.PIPE,
                stdout=self.screen,
                stderr=self.screen,
                pass_fds=(its,),
                start_new_session=True,  # Ctrl-C reaches the sweep, which decides
            )
        finally:
            os.close(its)
        self._write(setup)

    def _write(self, message: Setup | SlotJob) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has died, which its answers say
            self.process.stdin.write(json.dumps(asdict(message)).encode() + b"\n")
            self.process.stdin.flush()

    def start(self, job: SlotJob) -> None:
        """Hand a job to the process."""
        self.job, self.is_new = job.number, False
        self._write(job)

    def read(self) -> list[End] | None:
        """Return the answers that have come; None: the process has ended."""
        if not (more := os.read(self.answers, LINE)):
            return None
        *lines, self._read = (self._read + more).split(b"\n")
        return [End(**json.loads(line)) for line in lines]

    def signal(self, number: int) -> None:
        """Send a signal to the process; SIGKILL to all that it has started."""
        with suppress(ProcessLookupError):
            (os.killpg if number == signal.SIGKILL else os.kill)(self.process.pid, number)

    def end(self) -> None:
        """Let the process end, which has no job."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    def gone(self) -> str:
        """Wait for the end of the process, and release what belongs to it; returns how it ended, and its last words."""
        self.end()
        try:
            code = self.process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            code = self.process.wait()
        os.close(self.answers)
        with self.screen:
            self.screen.seek(0)
            said = self.screen.read().decode(errors="replace").strip()
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"its process {how}{hint}{chr(10) * bool(said)}{said}"


class Pool:
    """The slot processes of a sweep. They are started with the first job that needs them.

    Args:
        slots: of each process. setup: the first line that each process reads.
    """

    def __init__(self, slots: Sequence[Slots], setup: Setup) -> None:
        self.slots, self.setup = list(slots), setup
        self.processes: dict[int, SlotProcess] = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        for one in self.processes.values():
            one.end() if one.job is None and not one.is_new else one.signal(signal.SIGKILL)
        for one in self.processes.values():
            one.gone()
        self.processes.clear()

    @property
    def running(self) -> dict[int, SlotProcess]:
        """The processes that run jobs, by the job's number."""
        return {one.job: one for one in self.processes.values() if one.job is not None}

    @property
    def is_full(self) -> bool:
        """Whether no slots are free."""
        return len(self.running) == len(self.slots)

    def warm(self, count: int) -> None:
        """Start processes for so many jobs, whose imports begin."""
        for place in range(min(count, len(self.slots))):
            if place not in self.processes:
                self.processes[place] = SlotProcess(self.slots[place], self.setup)

    def start(self, job: SlotJob) -> None:
        """Start a job in free slots."""
        place = next(n for n in range(len(self.slots)) if n not in self.processes or self.processes[n].job is None)
        self.warm(place + 1)
        self.processes[place].start(job)

    def ends(self, timeout_s: float) -> list[tuple[int, End]]:
        """Wait until a job ends, or so many seconds; returns numbers and ends of the jobs.

        Raises:
            RunFailed: a process has died before it was ready for a job.
        """
        found: list[tuple[int, End]] = []
        by_answers = {one.answers: (place, one) for place, one in self.processes.items()}
        if not by_answers:
            time.sleep(timeout_s)
        for ready in connection.wait(list(by_answers), timeout_s):
            assert isinstance(ready, int)
            place, one = by_answers[ready]
            if (answers := one.read()) is None:
                del self.processes[place]
                how = one.gone()
                if one.job is None:
                    raise RunFailed(f"a process for jobs of the sweep could not begin: {how}")
                found.append((one.job, End("failed", how, died=True)))
                continue
            for answer in answers:
                if one.job is not None:
                    found.append((one.job, answer))
                one.job = None
        return found
