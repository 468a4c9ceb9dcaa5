"""Runs the only worker in this process; its output goes to the screen and to workerlog.0."""

from __future__ import annotations

import contextlib
import os
import secrets
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.config.instantiate import locate
from trainer.errors import Interrupted, RunFailed, UserError
from trainer.host import interpreter
from trainer.host.addresses import LOOPBACK, free_port
from trainer.host.notes_board import SealedBoard
from trainer.launch.process_reports import environment, leave_plan
from trainer.planning.launcher import Assignment
from trainer.strategies.seat import Seat
from trainer.terminal import streams


def in_place(assignment: Assignment) -> dict[str, Any]:
    """Run the plan's only worker in this process.

    Raises:
        RunFailed: the training failed; the message holds the traceback.
    """
    plan, run_dir = assignment.plan, Path(assignment.plan.paths.run_dir)
    board = SealedBoard(dist.HashStore(), secrets.token_bytes(32))
    seat = Seat("worker", 0, 1, 0, 1, plan.topology.processes[0].device, board, group_store=dist.HashStore())
    quiet = assignment.config.verbosity == "quiet"
    with (
        _kept_log(run_dir / "workerlog.0", assignment.goes_on) as log,
        streams.teed(log, quiet),
        interpreter.at_work(),
        alone(),
    ):
        process = replace(plan.topology.processes[0], endpoint=LOOPBACK, pid=os.getpid())
        leave_plan(plan.changed(topology={"processes": [process], "environment": {"worker": environment()}}))
        try:
            outcome: dict[str, Any] = locate(plan.strategy.entries["worker"])(seat, assignment)
            return outcome
        except (RunFailed, UserError, Interrupted):
            raise
        except (Exception, SystemExit) as error:  # the user's code may call sys.exit
            from trainer.launch.process import refused_by_machine

            if refused := refused_by_machine(error):
                raise RunFailed(f"worker 0: {refused}") from error
            raise RunFailed(f"worker 0:\n{traceback.format_exc()}  its log: {run_dir}/workerlog.0") from error


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Context manager: sets the variables that torch expects of a lone process (RANK=0, WORLD_SIZE=1, MASTER_ADDR)."""
    ours = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(free_port(LOOPBACK)),
    }
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
