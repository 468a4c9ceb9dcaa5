"""A process from the forkserver: its output goes to one log, and a private pipe tells its parent how it ended.

Results and failures come through a pipe that only parent and child hold; no file is read back. A failure is JSON. A
result is a pickle, which is safe because the parent's own child has made it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from trainer.errors import Interrupted, Missing, NotFinite, RunFailed, UserError
from trainer.host import json_text, machine_limits
from trainer.host.files import FULL, REFUSED, is_part
from trainer.host.notes_board import FolderLost, NoNote
from trainer.terminal import streams

MOST_TEXT = 30_000
"""Characters of an error: so many fit into a pipe that nobody reads."""
DONE = b""
OS_ERROR = re.compile(r"\(os error (\d+)\)")
EXIT_CODE_S = 1.0
"""Longest wait for a dead process's exit code from the forkserver, when all processes end."""
GONE_S = 10.0
"""The same while other processes go on: the machine may be slow."""
UNKNOWN = 255
"""Exit code of a process whose exit code is unknown, as in multiprocessing after the forkserver was killed."""
STACKS = signal.SIGUSR2
"""The signal at which a started process writes its Python stacks into its log."""


@dataclass(frozen=True)
class Failure:
    """The report of a process about its own failure, for its parent.

    Attributes:
        at: time in nanoseconds, by the monotonic clock of the host.
        words: the message of a RunFailed, UserError or lost board; otherwise the traceback.
        for_users: the words are a message for users.
        ends_run: the run ends, even if other processes could go on.
        where: step, epoch and update of a :class:`NotFinite`.
        follows: the cause is the end of another process.
        missing: processes that did not come or answer in time (:class:`Missing`).
        retryable: a restarted process may succeed, as after a death.
    """

    at: int
    words: str
    for_users: bool
    ends_run: bool = False
    where: tuple[int, int, int] | None = None
    follows: bool = False
    missing: Sequence[str] = ()
    retryable: bool = False

    def __str__(self) -> str:
        return f": {self.words}" if self.for_users else f":\n{self.words}"

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Make the failure of a caught exception; an error for users counts even if another error followed from it."""
        at, step = time.monotonic_ns(), error
        if not isinstance(error, (RunFailed, UserError)) and (refused := refused_by_machine(error)):
            return cls(at, refused, True)
        if isinstance(error, NoNote):
            lost = "" if isinstance(error, FolderLost) else "the run's other processes cannot be reached: "
            return cls(at, f"{lost}{error}", True)
        while not isinstance(step, (RunFailed, UserError)):
            if step.__cause__ is not None or step.__context__ is None:
                return cls(at, _for_pipe("".join(traceback.format_exception(error)).rstrip()), False)
            step = step.__context__
        where = (step.step, step.epoch, step.update) if isinstance(step, NotFinite) else None
        ends, follows = getattr(step, "ends_run", True), getattr(step, "follows", False)
        missing = step.who if isinstance(step, Missing) else ()
        return cls(at, _for_pipe(str(step)), True, ends, where, follows, missing, getattr(step, "retryable", False))


class FailureReport:
    """Sends the failure of this process to its parent, once: the first one counts. Can be called from any thread.

    A process that has failed calls it before it leaves the other processes, which may hang.

    Args:
        send: takes the failure as JSON.
    """

    def __init__(self, send: Callable[[str], object]) -> None:
        self._send, self._lock, self._sent = send, threading.Lock(), False

    def __call__(self, error: BaseException) -> None:
        """Send the failure, unless one was sent.

        Raises:
            OSError, RuntimeError: the parent is gone.
        """
        with self._lock:
            if not self._sent:
                self._send(json.dumps(asdict(Failure.of(error))))
                self._sent = True


def refused_by_machine(error: BaseException) -> str:
    """The sentence for an error of the machine (a limit, a full disk, a read-only folder); '' for other errors.

    safetensors reports a full disk in its message alone.
    """
    if limit := machine_limits.reached(error):
        return limit
    if isinstance(error, OSError) and (error.errno in FULL or (error.errno in REFUSED and is_part(error.filename))):
        return f"{error.filename or 'a file'} cannot be written: {error.strerror}"
    system_error = OS_ERROR.search(str(error))
    return (
        f"a file cannot be written: {os.strerror(int(system_error[1]))}"
        if system_error and int(system_error[1]) in FULL
        else ""
    )


class Child:
    """The handle of a process from the forkserver.

    Args:
        enter: called in the process with ``arguments`` and a :class:`FailureReport`; importable, as all of them are
            pickled.
        environment: variables of the process.
        log: an existing file, to which both of its streams go.
        folder: for its temporary files.
    """

    def __init__(
        self,
        enter: Callable[..., Any],
        arguments: Sequence[Any],
        environment: Mapping[str, str],
        log: Path,
        folder: Path,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        self.log = log
        self.pipe, theirs = context.Pipe()
        self._code: int | None = None
        self._gone_since: float | None = None
        self._closed = False
        self.hung_up = False
        self.returned = False
        self.value: Any = None
        self.failure: Failure | None = None
        self.process = context.Process(
            target=_main, args=(theirs, enter, tuple(arguments), dict(environment), str(log), str(folder))
        )
        self.process.start()
        self.itself = _descriptor_of(self.process.pid)
        theirs.close()

    @property
    def exitcode(self) -> int | None:
        """The child's exit code (as :class:`multiprocessing.Process`): None while it runs, negative for a signal.

        If the child is gone and the forkserver, which may be stopped, does not report its exit code, it is 0 for a
        child that has returned, else ``UNKNOWN``.
        """
        if self._code is None:
            self._code = self.process.exitcode
        if self._code is None and self._has_gone():
            self._code = 0 if self.returned else UNKNOWN
        return self._code

    @property
    def well(self) -> bool:
        """Whether the child has ended successfully."""
        return self.exitcode == 0 and self.returned

    def _has_gone(self) -> bool:
        """Whether the child ended more than ``GONE_S`` ago."""
        if self.itself is not None and not connection.wait([self.itself], 0.0):
            return False
        if self._gone_since is None:
            self._gone_since = time.monotonic()
        return time.monotonic() - self._gone_since > GONE_S

    def signs(self) -> list[Any]:
        """The child's pipe and sentinel, which become ready when there is something to read."""
        return [self.process.sentinel] if self.hung_up else [self.process.sentinel, self.pipe]

    def poll(self) -> None:
        """Read the child's result or failure from the pipe."""
        while not self.hung_up and self.pipe.poll():
            try:
                head = self.pipe.recv_bytes()
                if head == DONE:
                    self.value, self.returned = self.pipe.recv(), True
                else:
                    self.failure = Failure(**json_text.loads(head))
            except (EOFError, OSError):
                self.dismiss()

    def dismiss(self) -> None:
        """Let the child end."""
        if not self.hung_up:
            self.hung_up = True
            self.pipe.close()

    def dump(self) -> bool:
        """Have the child write its Python stacks into its log; returns whether it can be asked to."""
        self.signal(STACKS)
        return True

    def signal(self, number: signal.Signals) -> None:
        """Send the child a signal if it still exists; it may outlive its forkserver."""
        if self.itself is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.itself, number)

    def join(self, seconds: float) -> None:
        """Wait until the child has ended, at most ``seconds``."""
        if self.itself is not None and connection.wait([self.itself], seconds):
            os.close(self.itself)
            self.itself = None
        if self._closed:
            return
        self.process.join(EXIT_CODE_S if self.itself is None else 0.0)
        if self.itself is None and self.process.exitcode is None:  # Python would wait for the forkserver at exit
            self._code = UNKNOWN if self._code is None else self._code
            self.process._popen.returncode = self._code  # type: ignore[attr-defined]
        if self.process.exitcode is not None:
            self._code, self._closed = self.process.exitcode, True
            self.process.close()  # closes its descriptors now, not when garbage is collected


def _descriptor_of(pid: int | None) -> int | None:
    """A descriptor of a process, valid even if its id is used again; None: the process is gone."""
    try:
        return os.pidfd_open(pid or 0)
    except ProcessLookupError:
        return None


def _main(
    pipe: Any, enter: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str], log: str, folder: str
) -> None:
    """The main function of the started process."""
    os.environ.update(environment)
    to_log(log, folder)
    report = FailureReport(lambda failure: pipe.send_bytes(failure.encode()))
    try:
        value = bytes(ForkingPickler.dumps(returned(enter, (*arguments, report))))
        pipe.send_bytes(DONE)
        pipe.send_bytes(value)
    except KeyboardInterrupt:  # a terminal sends it to all processes; the parent reports it
        sys.exit(128 + signal.SIGINT)
    except (Exception, Interrupted) as error:
        report(error)
        sys.exit(1)
    try:
        pipe.recv_bytes()  # all end together: a peer may still read from this process
    except (EOFError, OSError, KeyboardInterrupt):
        pass


def to_log(log: str, folder: str) -> None:
    """Redirect everything that this process prints to its log, and its temporary files to ``folder``."""
    os.environ.update(TMPDIR=folder)
    tempfile.tempdir = folder
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
    streams.to_log(output)
    os.close(output)
    faulthandler.enable(all_threads=True)
    faulthandler.register(STACKS, all_threads=True)


def returned(enter: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call a process's entry function and return its result.

    Raises:
        RuntimeError: the function called sys.exit.
    """
    try:
        return enter(*arguments)
    except SystemExit as error:  # from the user's code: the work is not done, whatever the exit code
        raise RuntimeError(f"the process was to end by sys.exit({error.code!r})") from error


def _for_pipe(text: str) -> str:
    """The text, shortened in the middle if it is too long for the pipe."""
    if len(text) <= MOST_TEXT:
        return text
    return f"{text[: MOST_TEXT // 3]}\n... ({len(text)} characters)\n{text[-MOST_TEXT // 2 :]}"


def resolve(entry: str) -> Callable[..., Any]:
    """Import a process's entry function ``module:name``."""
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
