"""The runner: one process per host that starts queued runs into slots, and follows them to their end.

A run is an ordinary ``python -m trainer`` below a small shell, which leaves the exit code in a file whatever becomes of
the runner. Both hold a lock on ``runs/NUMBER.alive`` from before they exist until they are gone, as does whatever they
have started. So a new runner sees by the lock alone whether a run lives:

    starting, lock free   the runner before died before there was a process: queued again
    starting or running, lock held   it lives: followed
    running, lock free, exit code    it has ended
    running, lock free, none         killed, or the host has restarted: pre-empted, at most ``max_lost`` times

A run that has become the runner's child or not makes no difference: it is followed by lock and file.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from trainer.errors import Interrupted, RunPreempted
from trainer.host.engine_tasks import RESUME, RUN_DIR, SUBMITTED
from trainer.launch.engines.contract import ENGINE
from trainer.launch.engines.engine_folder import CODE
from trainer.service.queue import (
    ALIVE,
    CANCEL,
    CANCELLED,
    DONE,
    FAILED,
    LEAVE,
    MAKE_ROOM,
    PREEMPTED,
    QUEUED,
    RUNNING,
    STARTING,
    WAITING,
    Queue,
    Run,
    Slots,
)
from trainer.service.slots import decide, of_this_host

ENGINE_NAME = "queue"
POLL_S = 0.2
HARDER_S = 15.0
"""So long after ``grace_s`` a run that was asked to end is killed."""
SHELL = (
    'trap : TERM INT USR1 HUP; "$@"; code=$?; echo $code >"$TRAINER_CODE.new" && mv "$TRAINER_CODE.new" "$TRAINER_CODE"'
)
"""Runs a command and leaves its exit code in a file. It waits for the command whatever signal comes."""
LOCK = "runner.lock"


class Runner:
    """Moves the runs of a queue.

    Args:
        slots: of this host; None: all that it has.
    """

    def __init__(self, queue: Queue, slots: Slots | None = None) -> None:
        self.queue, self.slots = queue, of_this_host() if slots is None else slots
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self.asked: dict[int, tuple[str, float]] = {}
        self.stops = False

    def run(self, idle_s: float | None = None) -> None:
        """Move runs until SIGTERM; or, with ``idle_s``, until nothing has waited or lived for so many seconds.

        SIGTERM leaves the runs alone: they go on, and the next runner follows them.
        """
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        busy = time.monotonic()
        try:
            while not self.stops:
                if self.turn():
                    busy = time.monotonic()
                elif idle_s is not None and time.monotonic() - busy > idle_s:
                    return
                time.sleep(POLL_S)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: object) -> None:
        self.stops = True

    def turn(self) -> bool:
        """Look at all runs once, and move those that can be; returns whether any waits or lives."""
        for run in self.queue.in_states(ALIVE):
            self._follow(run)
        waiting = [run for run in self.queue.in_states(WAITING) if not self._cancelled(run)]
        alive = self.queue.in_states(ALIVE)
        plan = decide(self.slots, waiting, alive)
        for run in waiting:
            if (reason := plan.reasons.get(run.number, run.reason)) != run.reason:
                self.queue.move(run.number, WAITING, reason=reason)
        for number in plan.stop:
            self.queue.move(number, (RUNNING,), asked=MAKE_ROOM)
        for run in waiting:
            if (slots := plan.start.get(run.number)) is not None:
                self._start(run, slots)
        return bool(waiting or alive)

    def _cancelled(self, run: Run) -> bool:
        if run.asked not in (CANCEL, LEAVE):
            return False
        self._end(run, CANCELLED, Interrupted.exit_code, "while it waited")
        return True

    # -- start ---------------------------------------------------------------------------------------------------------

    def _start(self, run: Run, slots: Slots) -> None:
        files = _Files(self.queue.folder, run.number)
        lock = files.held()
        if lock is None:  # its last life has not wholly gone
            return
        try:
            files.code.unlink(missing_ok=True)
            files.pid.unlink(missing_ok=True)
            if not self.queue.move(
                run.number, WAITING, state=STARTING, reason="", slots=slots, life=run.life + 1, began=time.time()
            ):
                return
            log = os.open(run.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                child = self._process(run, slots, files, lock, log)
            finally:
                os.close(log)
        except OSError as error:
            self._end(run, FAILED, 1, f"could not be started: {error.strerror}: {error.filename}")
            return
        finally:
            os.close(lock)
        self.children[run.number] = child
        self.queue.move(run.number, (STARTING,), state=RUNNING)

    def _process(self, run: Run, slots: Slots, files: _Files, lock: int, log: int) -> subprocess.Popen[bytes]:
        environment = {
            **run.environment,
            SUBMITTED: ENGINE_NAME,
            RUN_DIR: run.folder,
            "TRAINER_CODE": str(files.code),
            "CUDA_VISIBLE_DEVICES": ",".join(slots.gpus),
        }
        if run.life:
            environment[RESUME] = "auto"
        keep = f"echo $$ >{shlex.quote(str(files.pid))}; "
        return subprocess.Popen(  # the words of the user's own command  # nosec B603
            ["/bin/sh", "-c", keep + SHELL, "sh", *run.command, "-m", "trainer", *run.words],
            cwd=run.started_in,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(lock,),
            start_new_session=True,
            preexec_fn=partial(os.sched_setaffinity, 0, slots.cores),
        )

    # -- follow --------------------------------------------------------------------------------------------------------

    def _follow(self, run: Run) -> None:
        """Move a run that had processes when it was looked at last."""
        if (child := self.children.get(run.number)) is not None:
            child.poll()  # or it stays a zombie
        files = _Files(self.queue.folder, run.number)
        if (lock := files.held()) is None:
            if run.state == STARTING:
                self.queue.move(run.number, (STARTING,), state=RUNNING)
            self._ask(run, files)
            return
        os.close(lock)
        self.children.pop(run.number, None)
        self.asked.pop(run.number, None)
        code = files.exit_code()
        if code is None and run.state == STARTING:
            self.queue.move(run.number, (STARTING,), state=QUEUED, slots=Slots())
        elif code is None:
            self._lost(run)
        elif run.asked == CANCEL:
            self._end(run, CANCELLED, Interrupted.exit_code, "")
        elif code == RunPreempted.exit_code and run.asked != LEAVE:
            self._preempted(run)
        else:
            self._end(run, DONE if code == 0 else FAILED, code, "" if code == 0 else f"exit code {code}")

    def _ask(self, run: Run, files: _Files) -> None:
        """Ask a living run once for what it is to do, and kill it if it does not."""
        if not run.asked:
            return
        what, since = self.asked.get(run.number, ("", 0.0))
        if what != run.asked:
            if files.signal(signal.SIGTERM):
                self.asked[run.number] = (run.asked, time.monotonic())
        elif time.monotonic() - since > run.grace_s + HARDER_S:
            files.signal(signal.SIGKILL)

    def _lost(self, run: Run) -> None:
        if run.asked in (CANCEL, LEAVE):
            self._end(run, CANCELLED, Interrupted.exit_code, "killed")
        elif run.lost >= run.max_lost:
            self._end(run, FAILED, 137, f"its processes were gone {run.lost + 1} times without an exit code")
        else:
            self._wait_again(run, "its processes were gone", lost=run.lost + 1)

    def _preempted(self, run: Run) -> None:
        if run.max_preemptions is not None and run.preempted >= run.max_preemptions:
            self._end(run, FAILED, RunPreempted.exit_code, f"pre-empted {run.preempted + 1} times")
        else:
            self._wait_again(run, "", preempted=run.preempted + 1)

    def _wait_again(self, run: Run, reason: str, **counts: int) -> None:
        self.queue.move(run.number, ALIVE, state=PREEMPTED, reason=reason, slots=Slots(), asked="", **counts)

    def _end(self, run: Run, state: str, code: int, reason: str) -> None:
        """The run has ended with this exit code."""
        Path(run.folder, ENGINE, CODE).write_text(f"{code}\n")
        self.queue.move(
            run.number, (*ALIVE, *WAITING), state=state, reason=reason, code=code, slots=Slots(), ended=time.time()
        )


class _Files:
    """The files of a run in the queue's folder."""

    def __init__(self, home: Path, number: int) -> None:
        self.alive = home / "runs" / f"{number}.alive"
        self.code, self.pid = self.alive.with_suffix(".code"), self.alive.with_suffix(".pid")

    def held(self) -> int | None:
        """Take the lock; returns its descriptor, which the run's processes inherit; None: a process of it lives."""
        return _locked(self.alive)

    def exit_code(self) -> int | None:
        """Return the exit code that the run has left; None: it has left none."""
        with suppress(OSError, ValueError):
            return int(self.code.read_text())
        return None

    def signal(self, number: int) -> bool:
        """Send a signal to the run's processes, which are a group of their own; returns whether there are any yet."""
        try:
            os.killpg(int(self.pid.read_text()), number)
        except (OSError, ValueError):
            return False
        return True


def only_one(folder: Path) -> int | None:
    """Take the lock of this host's runner; returns its descriptor; None: there is a runner."""
    return _locked(folder / LOCK)


def _locked(path: Path) -> int | None:
    """Take the lock of a file for as long as the descriptor is open that is returned; None: another process has it."""
    lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
