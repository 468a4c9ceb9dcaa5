"""The runner: one process on each host that starts queued runs into slots, and follows them to their end.

A run is an ordinary ``python -m trainer`` below a small shell, which leaves the exit code in a file whatever becomes of
the runner. Both hold a lock on ``runs/NUMBER.HOST.alive`` from before they exist until they are gone, as does whatever
they have started; and the shell notes the life that it began. So a new runner sees whether a part of a run lives:

    assigned, lock free, not begun   the runner before died before there was a process: started
    begun, lock held                 it lives: followed
    begun, lock free, exit code      it has ended
    begun, lock free, none           killed, or the host has restarted: pre-empted, at most ``max_lost`` times

A run that has become the runner's child or not makes no difference: it is followed by lock and files.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainer.errors import Interrupted, RunFailed, RunPreempted
from trainer.host import private
from trainer.host.code_version import code_version
from trainer.host.engine_tasks import ENGINE, FROZEN, HOST, HOSTS, OTHER_CODE, RESUME, RUN_DIR, SUBMITTED
from trainer.launch.engines.engine_folder import CODE
from trainer.planning.find_checkpoint import AUTO, FRESH
from trainer.service import memory
from trainer.service.part_files import PartFiles, locked
from trainer.service.queue import (
    ALIVE,
    ASSIGNED,
    CANCEL,
    CANCELLED,
    DONE,
    ENDED,
    FAILED,
    LEAVE,
    MAKE_ROOM,
    OWN,
    PREEMPTED,
    RUNNING,
    STARTED,
    STARTING,
    WAITING,
    Part,
    Queue,
    Run,
    Slots,
    this_host,
)
from trainer.service.slots import decide, of_this_host

POLL_S = 0.2
HARDER_S = 15.0
"""So long after ``grace_s`` a run that was asked to end is killed."""
BEAT_S = 5.0
"""Between two signs of life of a runner."""
SHELL = (
    'trap : TERM INT USR1 HUP; "$@"; code=$?; echo $code >"$TRAINER_CODE.new" && mv "$TRAINER_CODE.new" "$TRAINER_CODE"'
)
"""Runs a command and leaves its exit code in a file. It waits for the command whatever signal comes."""
GIT_S = 0.1
"""So long a turn waits for git, which is asked by another thread: a run may start in a later turn."""
BOOT = Path("/proc/sys/kernel/random/boot_id")


class Runner:
    """Moves the runs of a queue that are, or are to be, on this host.

    Args:
        slots: of this host; None: all that it has. host: its name in the queue; None: its own.
    """

    def __init__(self, queue: Queue, slots: Slots | None = None, host: str | None = None) -> None:
        self.queue, self.slots = queue, of_this_host() if slots is None else slots
        self.host = this_host(queue.folder) if host is None else host
        self.versions: dict[tuple[int, int], Future[str]] = {}
        self.asking = ThreadPoolExecutor(4)
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self.asked: dict[int, tuple[str, float]] = {}
        self.boot = BOOT.read_text().strip() if BOOT.exists() else ""
        self.weighed: dict[int, float] = {}
        self.beaten = float("-inf")
        self.decided_on: tuple[object, ...] = ()
        self.waits = False
        self.stops = 0
        self.said = ""

    def run(self, idle_s: float | None = None, leave: bool = False) -> None:
        """Move runs until SIGTERM or Ctrl-C; or, with ``idle_s``, until none has waited or lived for so many seconds.

        Then this host's runs save and wait for the next runner; with ``leave``, or after a second signal, they go on,
        and the next runner follows them.

        Raises:
            RunFailed: the queue is no longer there.
        """
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        busy = time.monotonic()
        try:
            while not self.stops:
                self.queue.check_place()
                if self._turned():
                    busy = time.monotonic()
                elif idle_s is not None and time.monotonic() - busy > idle_s:
                    break
                time.sleep(POLL_S)
            with suppress(RunFailed):
                self.queue.beat(self.host, None)
            while self.stops == 1 and not leave and self._saves():
                time.sleep(POLL_S)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: object) -> None:
        self.stops += 1

    def _turned(self) -> bool:
        """Turn, and go on where the queue's file cannot be written now; returns whether any run waits or lives."""
        try:
            busy = self.turn()
        except RunFailed as error:
            if str(error) != self.said:
                print(f"waits: {error}", file=sys.stderr, flush=True)
            self.said = str(error)
            return True
        self.said = ""
        return busy

    def _saves(self) -> bool:
        """Ask this host's runs to save and wait, and follow them; returns whether any still lives."""
        with suppress(RunFailed):
            for run in self._here():
                if not run.asked:
                    self.queue.move(run.number, ALIVE, asked=MAKE_ROOM)
            for run in self._here():
                self._follow(run)
            return bool(self._here())
        return True

    def _here(self) -> list[Run]:
        """The living runs that have a part on this host which has not ended."""
        return [
            run for run in self.queue.in_states(ALIVE) if self.host in run.parts and run.parts[self.host].state != ENDED
        ]

    def turn(self) -> bool:
        """Look at all runs once, and move those that can be; returns whether any waits or lives."""
        if time.monotonic() - self.beaten > BEAT_S:
            self.queue.beat(self.host, self.slots)
            self.beaten = time.monotonic()
        for run in self._here():
            self._follow(run)
        seen = self.queue.version(), self.queue.hosts()
        if seen != self.decided_on:  # thousands of runs may wait: they are read only after a change
            self.waits = self._assign()
            self.decided_on = seen
            for run in self._here():
                if run.parts[self.host].state == ASSIGNED:
                    self._follow(run)
        return self.waits or bool(self.queue.in_states(ALIVE))

    def _assign(self) -> bool:
        """Give slots to runs that wait, on any host, and ask others to make room. Runners do this one at a time.

        Returns whether any run waits.
        """
        with self.queue.change():
            waits = self.queue.in_states(WAITING)
            cancelled = [run for run in waits if run.asked in (CANCEL, LEAVE)]
            waiting = [run for run in waits if run.asked not in (CANCEL, LEAVE)]
            alive = self.queue.in_states(ALIVE)
            plan = decide({**self.queue.hosts(), self.host: self.slots}, waiting, alive)
            for run in waiting:
                if (slots := plan.start.get(run.number)) is not None:
                    parts = {host: Part(one) for host, one in slots.items()}
                    life = {"life": run.life + 1, "began": time.time()}
                    self.queue.set(run.number, state=STARTING, reason="", parts=parts, **life)
                elif (reason := plan.reasons.get(run.number, run.reason)) != run.reason:
                    self.queue.set(run.number, reason=reason)
            for number in plan.stop:
                self.queue.set(number, asked=MAKE_ROOM)
        for run in cancelled:
            self._end(run, CANCELLED, Interrupted.exit_code, "while it waited")
        return bool(waiting)

    # -- start ---------------------------------------------------------------------------------------------------------

    def _begin(self, run: Run, files: PartFiles, lock: int) -> None:
        """Start this host's part of a run.

        Args:
            lock: of the part, which its processes inherit.
        """
        first = next(iter(run.parts))
        if self.host != first and not run.parts[first].meeting:
            return  # the first host says where to meet
        if (version := self._code_version(run)) is None:
            return
        if self.host == first and run.hosts > 1:
            self._set_part(run, meeting=_meeting())  # once: another host may start from now on
        number = list(run.parts).index(self.host)
        log = Path(run.log) if number == 0 else Path(run.log).with_name(f"host.{number}.log")
        try:
            files.clear()
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                child = self._process(run, number, files, lock, descriptor, version)
            finally:
                os.close(descriptor)
        except (OSError, subprocess.SubprocessError) as error:
            said = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error)
            self._part_ended(run, 1, f"could not be started: {said}")
            return
        self.children[run.number] = child
        self._set_part(run, state=STARTED, boot=self.boot)

    def _code_version(self, run: Run) -> str | None:
        """The code that a life of a run starts on; None: git has not answered yet."""
        life = run.number, run.life
        if life not in self.versions:
            self.versions[life] = self.asking.submit(code_version, run.started_in)
        try:
            version = self.versions[life].result(GIT_S)
        except TimeoutError:
            return None
        del self.versions[life]
        return version

    def _process(self, run: Run, host: int, files: PartFiles, lock: int, log: int, now: str) -> subprocess.Popen[bytes]:
        environment, config = self.queue.start_of(run.number)
        slots = run.parts[self.host].slots
        environment |= {
            SUBMITTED: OWN,
            RUN_DIR: run.folder,
            "TRAINER_CODE": str(files.code),
            "CUDA_VISIBLE_DEVICES": ",".join(slots.gpus),
        }
        if config:
            private.write(files.config, config)
            environment[FROZEN] = str(files.config)
        if run.code_version and now != run.code_version:
            environment[OTHER_CODE] = f"submitted with other code ({run.code_version}) than it runs on ({now})"
        if run.life > run.fresh:
            environment[RESUME] = AUTO
        elif run.fresh > 1:  # a retry, whose folder has the checkpoints that it gives up
            environment[RESUME] = FRESH
        if run.hosts > 1:
            there = self.queue.run(run.number) or run
            address, _, port = next(iter(there.parts.values())).meeting.rpartition(":")
            environment |= {HOSTS: str(run.hosts), HOST: str(host), "MASTER_ADDR": address, "MASTER_PORT": port}
        self.queue.set(run.number, ran_on=now)
        begins = f"echo $$ {run.life} >{shlex.quote(str(files.begun))}; "
        own_cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, slots.cores)  # of this thread, which a child inherits
        try:
            return subprocess.Popen(  # the words of the user's own command  # nosec B603
                ["/bin/sh", "-c", begins + SHELL, "sh", *run.command, "-m", "trainer", *run.words],
                cwd=run.started_in,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(lock,),
                start_new_session=True,
            )
        finally:
            os.sched_setaffinity(0, own_cores)

    # -- follow --------------------------------------------------------------------------------------------------------

    def _follow(self, run: Run) -> None:
        """Move this host's part of a run, which has not ended as far as the queue knows."""
        if (child := self.children.get(run.number)) is not None:
            child.poll()  # or it stays a zombie
        files, part = PartFiles(self.queue.folder, run.number, self.host), run.parts[self.host]
        lock = files.held()
        has_begun = files.life() == run.life
        if lock is None:
            if has_begun and part.state == ASSIGNED:
                self._set_part(run, state=STARTED, boot=self.boot)
            if has_begun:
                self._check_memory(run, files)
                self._ask(run, files)
            return
        try:
            if part.state == ASSIGNED and not has_begun:
                if _stops(run):
                    self._part_ended(run, RunPreempted.exit_code)
                else:
                    self._begin(run, files, lock)
                return
        finally:
            os.close(lock)
        self.children.pop(run.number, None)
        code, was_asked = files.exit_code(), self.asked.pop(run.number, None)
        if code == 128 + signal.SIGTERM and (was_asked or _stops(run)):  # the signal came before Python took it
            code = RunPreempted.exit_code
        self._part_ended(run, code)

    def _check_memory(self, run: Run, files: PartFiles) -> None:
        """Let a run end whose part here takes more memory than was set aside for it; it is asked to save first."""
        if not run.memory or run.asked or time.monotonic() - self.weighed.get(run.number, float("-inf")) < BEAT_S:
            return
        self.weighed[run.number] = time.monotonic()
        if (used := memory.of_tree(files.group())) > run.memory:
            reason = f"took {used >> 20} MiB of memory, and launch.memory sets {run.memory >> 20} MiB aside"
            self.queue.move(run.number, ALIVE, run.life, asked=LEAVE, reason=reason)

    def _ask(self, run: Run, files: PartFiles) -> None:
        """Ask a living part once for what it is to do, and kill it if it does not."""
        if not (what := _stops(run)):
            return
        before, since = self.asked.get(run.number, ("", 0.0))
        if what != before:
            if files.signal(signal.SIGTERM):
                self.asked[run.number] = (what, time.monotonic())
        elif time.monotonic() - since > run.grace_s + HARDER_S:
            files.signal(signal.SIGKILL)

    def _set_part(self, run: Run, **values: object) -> None:
        """Change this host's part of a run, which is running once all its parts have been started."""
        with self.queue.change():
            now = self.queue.run(run.number)
            if now is None or self.host not in now.parts or now.life != run.life:
                return
            parts = {**now.parts, self.host: replace(now.parts[self.host], **values)}  # type: ignore[arg-type]
            is_waiting = any(part.state == ASSIGNED for part in parts.values())
            self.queue.set(run.number, parts=parts, state=STARTING if is_waiting else RUNNING)

    def _part_ended(self, run: Run, code: int | None, reason: str = "") -> None:
        """This host's part has ended, with this exit code or without one; the last one ends the life of the run."""
        restarted = code is None and run.parts[self.host].boot not in ("", self.boot)
        self._set_part(run, state=ENDED, code=code)
        now = self.queue.run(run.number)
        if now is None or now.life != run.life or now.state not in ALIVE:
            return
        if any(part.state != ENDED for part in now.parts.values()):
            if reason:
                self.queue.move(run.number, ALIVE, reason=reason)
            return
        codes = [part.code for part in now.parts.values()]
        failed = next((code for code in codes if code not in (None, 0, RunPreempted.exit_code)), None)
        reason = reason or now.reason
        if None in codes:
            self._lost(now, restarted)
        elif now.asked == CANCEL:
            self._end(now, CANCELLED, Interrupted.exit_code, "")
        elif failed is not None:
            self._end(now, FAILED, failed, reason or f"exit code {failed}")
        elif RunPreempted.exit_code not in codes:
            self._end(now, DONE, 0, "")
        elif now.asked == LEAVE:
            self._end(now, FAILED, RunPreempted.exit_code, reason or f"exit code {RunPreempted.exit_code}")
        else:
            self._preempted(now)

    def _lost(self, run: Run, restarted: bool) -> None:
        if run.asked == LEAVE and run.reason:
            self._end(run, FAILED, 137, run.reason)
        elif run.asked in (CANCEL, LEAVE):
            self._end(run, CANCELLED, Interrupted.exit_code, "killed")
        elif restarted:
            self._wait_again(run, "the host has restarted")
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
        values = {"state": PREEMPTED, "reason": reason, "parts": {}, "asked": "", **counts}
        self.queue.move(run.number, ALIVE, run.life, **values)

    def _end(self, run: Run, state: str, code: int, reason: str) -> None:
        """The run has ended with this exit code."""
        with suppress(OSError):  # its folder is gone, or the disk is full: the queue has the code
            Path(run.folder, ENGINE, CODE).write_text(f"{code}\n")
        values = {"state": state, "reason": reason, "code": code, "parts": {}, "ended": time.time()}
        self.queue.move(run.number, (*ALIVE, *WAITING), run.life, **values)
        PartFiles(self.queue.folder, run.number, self.host).config.unlink(missing_ok=True)


def _stops(run: Run) -> str:
    """What a living part is to stop for: what its run is asked for, or that another part has ended in vain."""
    others = any(part.state == ENDED and part.code != 0 for part in run.parts.values())
    return run.asked or ("another host" if others else "")


def _meeting() -> str:
    """Address and free port of this host where the hosts of a run meet."""
    from trainer.host import addresses

    own = addresses.address()
    return f"{own}:{addresses.free_port(own)}"


def only_one(folder: Path, host: str | None = None) -> int | None:
    """Take the lock of this host's runner; returns its descriptor; None: there is a runner."""
    return locked(folder / f"runner.{host or this_host(folder)}.lock")
