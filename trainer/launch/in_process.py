"""Runs the only worker in this process; what it prints goes to the screen and to workerlog.0."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.config.instantiate import locate
from trainer.errors import Interrupted, RunFailed, UserError
from trainer.host import interpreter
from trainer.host.addresses import LOOPBACK, free_port
from trainer.host.notes_board import SealedBoard
from trainer.launch.whereabouts import environment, leave_plan
from trainer.planning.assignment import Assignment
from trainer.strategies.contract import Seat
from trainer.terminal import streams

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Reasons why nothing more can be written, which say all by themselves."""


def in_place(assignment: Assignment) -> dict[str, Any]:
    """Run the plan's only worker in this process.

    Raises:
        RunFailed: the training broke; with its traceback.
    """
    plan, run_dir = assignment.plan, Path(assignment.plan.run_dir)
    board = SealedBoard(dist.HashStore(), secrets.token_bytes(32))
    seat = Seat("worker", 0, 1, 0, 1, plan.processes[0].device, board, group_store=dist.HashStore())
    quiet = assignment.config.verbosity == "quiet"
    with (
        _kept_log(run_dir / "workerlog.0", assignment.goes_on) as log,
        teed(log, quiet),
        interpreter.at_work(),
        alone(),
    ):
        process = replace(plan.processes[0], endpoint=LOOPBACK, pid=os.getpid())
        leave_plan(replace(plan, processes=[process], environment={"worker": environment()}))
        try:
            outcome: dict[str, Any] = locate(plan.entries["worker"])(seat, assignment)
            return outcome
        except (RunFailed, UserError, Interrupted):
            raise
        except OSError as error:
            if error.errno not in FULL:
                raise RunFailed(f"worker 0:\n{traceback.format_exc()}  its log: {run_dir}/workerlog.0") from error
            raise RunFailed(
                f"worker 0 cannot write {error.filename or f'below {run_dir}'}: {error.strerror}"
            ) from error
        except (Exception, SystemExit) as error:  # of the user's own code, which may end the process
            raise RunFailed(f"worker 0:\n{traceback.format_exc()}  its log: {run_dir}/workerlog.0") from error


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Context manager: sets the variables that torch expects of a lone process (RANK=0, WORLD_SIZE=1, MASTER_ADDR)."""
    ours = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port(LOOPBACK))}  # fmt: skip
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _kept_log(path: Path, goes_on: bool = False) -> Iterator[Any]:
    """Context manager: yields the worker's log file; an error while it closes does not hide the run's own error."""
    log = streams.log(path, goes_on)
    try:
        yield log
    finally:
        with contextlib.suppress(OSError):
            log.close()


class _Tee:
    """A text stream that also writes to a file; a silent one, to the file alone."""

    def __init__(self, stream: Any, log: Any, silent: bool = False) -> None:
        self.stream = stream
        self.log = log
        self.silent = silent

    def write(self, text: str) -> int:
        self._keep(lambda log: log.write(text))
        return len(text) if self.silent else int(self.stream.write(text))

    def flush(self) -> None:
        self._keep(lambda log: log.flush())
        self.stream.flush()

    def _keep(self, step: Callable[[Any], Any]) -> None:
        """Into the log, as long as that goes: what is printed may be the reason why a run ends, a full disk among them."""
        if self.log is None:
            return
        try:
            step(self.log)
        except OSError as error:
            name, self.log = self.log.name, None
            self.stream.write(f"{name} is not written any more: {error.strerror}\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def teed(log: Any, quiet: bool = False) -> Iterator[None]:
    """Context manager: what this process prints goes to the log, too; ``quiet``: to the log only, except stderr."""
    with streams.restored():
        out, error = _Tee(sys.stdout, log, quiet), _Tee(sys.stderr, log)
        streams.stand_in(streams.Guard(out), streams.Guard(error))
        yield
