"""Submits a run for a user of the API: checks what they may, then starts ``python -m trainer submit``.

A process of its own composes the config, so a refusal is the command line's own sentence, and nothing of Hydra stays in
the service. It is a fork of :mod:`trainer.cli.warm_submit`, which has made the imports.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from trainer.errors import RunFailed, UserError
from trainer.service import allowed, queue
from trainer.service.tokens import Caller

MODULE = "trainer.cli.warm_submit"
LONGEST_S = 150.0
"""Longest wait for a submission, which ends itself before."""
AT_A_TIME = len(os.sched_getaffinity(0))


class Busy(Exception):
    """The error for a submission that may work later: an HTTP status, and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@contextmanager
def queue_of(home: Path) -> Iterator[queue.Queue]:
    """Context manager: the queue of a folder, for one request.

    Raises:
        RunFailed: it cannot be used now.
    """
    try:
        the_queue = queue.Queue(home)
    except UserError as error:
        raise RunFailed(error.why) from error
    with closing(the_queue):
        yield the_queue


class Submitter:
    """Puts runs of the API into the queue.

    Args:
        home: folder of the queue. folder: in which runs have their folders, and from which paths lead. recipes: that
        may be chosen. flags: before the overrides (``--config-dir``). environment: of the runs. quota: runs of one
        token that wait or live; the owner has none.
    """

    def __init__(
        self,
        home: Path,
        folder: Path,
        recipes: Collection[str],
        flags: Sequence[str] = (),
        environment: Mapping[str, str] = os.environ,
        quota: int = 20,
    ) -> None:
        self.home, self.folder, self.recipes, self.flags, self.quota = home, folder, recipes, flags, quota
        self.environment = {**environment, queue.HOME: str(home)}
        self._warm = _Warm(folder, self.environment)
        self._now: set[str] = set()
        self._changed = threading.Condition()

    def submit(self, caller: Caller, overrides: Sequence[str], key: str | None, priority: int) -> tuple[int, bool]:
        """Submit a run; returns its number, and whether it is new: the same key of the same caller is the same run.

        Raises:
            UserError: an override is not allowed, or the command line refuses it.
            Busy: the quota is used up, or others submit.
        """
        own_key = f"api/{caller.name}/{key or secrets.token_hex(8)}"
        if (before := self._with_key(own_key)) is not None:
            return before.number, False
        recipe = allowed.check(overrides, self.recipes, self.folder)
        if priority > 0 and not caller.owner:
            raise UserError(
                f"priority={priority}", "above 0 is for the owner, because others' runs make room", "priority=0"
            )
        with self._turn(caller, own_key):
            if (before := self._with_key(own_key)) is not None:
                return before.number, False
            self._start(recipe, overrides, own_key, priority)
        if (run := self._with_key(own_key)) is None:
            raise UserError("overrides", "submit no run: they show something only")
        return run.number, True

    @contextmanager
    def _turn(self, caller: Caller, key: str) -> Iterator[None]:
        """Context manager: nobody else submits with this key, and the quota counts this submission."""
        with self._changed:
            self._changed.wait_for(lambda: key not in self._now)
            if self._with_key(key) is None:
                self.check_quota(caller)
            self._now.add(key)
        try:
            yield
        finally:
            with self._changed:
                self._now.remove(key)
                self._changed.notify_all()

    def check_quota(self, caller: Caller) -> None:
        """Refuse one more run.

        Raises:
            Busy: the caller has as many as the quota already.
        """
        if caller.owner:
            return
        with queue_of(self.home) as the_queue:
            runs = the_queue.in_states((*queue.WAITING, *queue.ALIVE))
        own = {key for key in (*self._now, *(run.key or "" for run in runs)) if key.startswith(f"api/{caller.name}/")}
        if len(own) >= self.quota:
            raise Busy(429, f"{caller.name} has {len(own)} runs that wait or live, of {self.quota}")

    def _with_key(self, key: str) -> queue.Run | None:
        with queue_of(self.home) as the_queue:
            return the_queue.with_key(key)

    def _start(self, recipe: str, overrides: Sequence[str], key: str, priority: int) -> None:
        run_dir = self.folder / f"{recipe}-{secrets.token_hex(4)}"
        own = ["--priority", str(priority), "--key", f"'{key}'", f"hydra.run.dir='{run_dir}'"]
        code, said = self._warm.submit(["submit", *self.flags, *overrides, *own])
        if code is None:
            raise Busy(503, "the submission took too long, or its process was killed")
        if code:
            lines = said.strip().splitlines()
            said = next((line for line in lines if line.startswith("error: ")), (lines or ["no reason"])[-1])
            if code != UserError.exit_code:
                raise Busy(503, said.removeprefix("failed: "))
            raise Refused(said.removeprefix("error: "))


class _Warm:
    """The process of :mod:`trainer.cli.warm_submit`, which is started by the first submission.

    Args:
        folder, environment: of the process.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def submit(self, words: Sequence[str]) -> tuple[int | None, str]:
        """Run a command line; returns its exit code and its stderr. None: it has left no code."""
        own, its = socket.socketpair()
        with own:
            own.settimeout(LONGEST_S)
            with its:
                self._send(its)
            said = b""
            try:
                own.sendall(json.dumps(list(words)).encode())
                own.shutdown(socket.SHUT_WR)
                while more := own.recv(1 << 16):
                    said += more
            except OSError:
                return None, ""
        text, zero, code = said.rpartition(b"\0")
        return (int(code), text.decode(errors="replace")) if zero else (None, "")

    def _send(self, its: socket.socket) -> None:
        """Send a fork its socket, by the process, which is started if it does not live."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._started()
            assert self._control is not None
            try:
                socket.send_fds(self._control, [b"."], [its.fileno()])
            except OSError:  # it has just died
                self._started()
                socket.send_fds(self._control, [b"."], [its.fileno()])

    def _started(self) -> None:
        if self._control is not None:
            self._control.close()
        self._control, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(  # ourselves  # nosec B603
                [sys.executable, "-m", MODULE, str(its.fileno())],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(its.fileno(),),
                start_new_session=True,
            )


class Refused(UserError):
    """The error for a command line that was refused, in its own words."""

    def __init__(self, sentence: str) -> None:
        super().__init__("overrides", sentence)
        self.sentence = sentence

    def __str__(self) -> str:
        return self.sentence
