"""Runs in processes that torchrun has started: rank 0 is also the parent, and hands the config to the others."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.config.redact import text
from trainer.errors import Interrupted, RunFailed, UserError
from trainer.host import files
from trainer.host.notes_board import OwnBoard
from trainer.host.signals import NUMBERS
from trainer.launch.process_reports import environment, leave_plan
from trainer.launch.torchrun_handover import Handover, handover
from trainer.planning.launcher import Assignment, Starter
from trainer.terminal import streams


def join(lead: Callable[[Starter], object]) -> int:
    """Run as a process that torchrun has started: rank 0 leads, the others follow; returns the exit code.

    Args:
        lead: called on rank 0 alone; composes the config and runs the job with the ranks as its processes.
    """
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    store: Any = dist.PrefixStore("trainer", _store())
    try:
        way = handover(store)
    except UserError as error:
        _leave_error(error)
        if int(os.environ["LOCAL_RANK"]):
            return error.exit_code  # once for each host is enough
        raise
    if rank:
        return _follow(way, store, rank)
    try:
        lead(lambda assignment, _: _start(way, store, assignment))
    except (UserError, RunFailed, Interrupted) as error:
        _leave_error(error)
        way.stop(text(str(error)))  # its file stays after the run
        raise
    way.stop("")
    return 0


def _leave_error(error: BaseException) -> None:
    """Leave the sentence for torchrun's agent, which ends with it instead of "no error file"."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        said = {"message": text(str(error)), "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": said}))


def _start(way: Handover, store: Any, assignment: Assignment) -> dict[str, Any]:
    """Hand the config to the other ranks, and work as rank 0."""
    plan = assignment.plan
    leave_plan(plan.changed(topology={"environment": {"worker": environment()}}))
    way.give(assignment.as_dict())
    quiet = assignment.config.verbosity == "quiet"
    with streams.log(Path(plan.paths.run_dir) / "workerlog.0", assignment.goes_on) as log, streams.teed(log, quiet):
        return _work(store, way.board(), assignment, 0)


def _store() -> Any:
    """The store in which the ranks meet: of torchrun's agent, else rank 0 serves it at its address alone."""
    import datetime

    import torch.distributed as dist

    from trainer.launch.meeting_place import serve_store

    address, port, patience = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), datetime.timedelta(hours=1)
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if agent_serves or os.environ["RANK"] != "0":
        return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=patience)
    return serve_store(address, port, patience)


def _follow(way: Handover, store: Any, rank: int) -> int:
    """On the other ranks: wait for the assignment, and work. A text in its place is the reason to stop.

    SIGTERM gets its default handler, so that torchrun's agent can end the rank while C++ waits for the store.
    """
    for number in NUMBERS:
        signal.signal(number, signal.SIG_DFL)
    message = way.take()
    if isinstance(message, str):
        return UserError.exit_code if message else 0
    assignment = Assignment.of(message)
    sys.path[:0] = [folder for folder in assignment.plan.paths.own_code if folder not in sys.path]
    log = Path(assignment.plan.paths.run_dir) / f"workerlog.{rank}"
    log.parent.mkdir(parents=True, exist_ok=True)
    files.start(log, assignment.goes_on)
    with log.open("a") as file:
        streams.to_log(file.fileno())
    streams.confide(assignment)
    _work(store, way.board(), assignment, rank)
    return 0


def _shown(error: BaseException, rank: int, secrets: set[str]) -> BaseException:
    """The error as torchrun shows it and writes it to a file, without the config's secrets."""
    if isinstance(error, (RunFailed, UserError, Interrupted)):
        return error
    return RunFailed(f"worker {rank}:\n{text(''.join(traceback.format_exception(error)), secrets)}")


def _work(store: Any, board: OwnBoard, assignment: Assignment, rank: int) -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.errors import record

    from trainer.config.instantiate import locate
    from trainer.strategies.seat import Seat

    local, world, here = (int(os.environ[name]) for name in ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    device = f"cuda:{local}" if assignment.plan.topology.device == "cuda" else "cpu"
    secrets = set(assignment.secrets)
    entry = locate(assignment.plan.strategy.entries["worker"])

    def work(seat: Seat) -> dict[str, Any]:
        try:
            return entry(seat, assignment)  # type: ignore[no-any-return]
        except Exception as error:
            if (shown := _shown(error, rank, secrets)) is error:
                raise
            raise shown from None

    def send_failure(error: BaseException) -> None:
        _leave_error(_shown(error, rank, secrets))

    seat = Seat("worker", rank, world, local, here, device, board, group_store=store, send_failure=send_failure)
    outcome: dict[str, Any] = record(work)(seat)  # type: ignore[assignment]
    return outcome
