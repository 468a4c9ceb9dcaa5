"""Processes that torchrun has started: rank 0 is the parent as well, and hands the finished config to the others."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.config.redact import text, values
from trainer.errors import Interrupted, RunFailed, UserError
from trainer.host import private
from trainer.launch.handover import Handover, handover
from trainer.launch.in_process import teed
from trainer.terminal import streams

Start = Callable[[Any, dict[str, Any], Path], dict[str, Any]]
"""Starts a plan's processes with a payload, in a run's folder; returns worker 0's outcome."""


def join(lead: Callable[[Start], object]) -> int:
    """Run as one of torchrun's ranks; returns the exit code.

    Args:
        lead: called on rank 0 alone; composes the config and runs the job with the ranks as its processes.
    """
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    store: Any = dist.PrefixStore("trainer", _store())
    try:
        way = handover(store)
    except UserError as error:
        if int(os.environ["LOCAL_RANK"]):
            return error.exit_code  # once for each host is enough
        raise
    if rank:
        return _follow(way, store, rank)
    try:
        lead(lambda plan, payload, run_dir: _start(way, store, plan, payload, run_dir))
    except (UserError, RunFailed, Interrupted) as error:
        way.stop(str(error))
        raise
    way.stop("")
    return 0


def _start(way: Handover, store: Any, plan: Any, payload: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """Hand the config to the other ranks, and work as rank 0."""
    if set(plan.roles) != {"worker"}:
        raise RunFailed(f"torchrun starts workers alone; strategy={plan.strategy} has {', '.join(plan.roles)}")
    handed = way.give(payload)
    with streams.log(run_dir / "workerlog.0") as log, teed(log, payload["config"]["verbosity"] == "quiet"):
        return _work(store, handed, 0)


def _store() -> Any:
    import datetime

    import torch.distributed as dist

    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=not agent_serves and os.environ["RANK"] == "0",
        wait_for_workers=False,
        timeout=datetime.timedelta(hours=1),
    )


def _follow(way: Handover, store: Any, rank: int) -> int:
    """Any other rank: wait for the finished config; a text instead says that there is nothing to do."""
    payload = way.take()
    if isinstance(payload, str):
        return UserError.exit_code if payload else 0
    log = Path(payload["run_dir"]) / f"workerlog.{rank}"
    log.parent.mkdir(parents=True, exist_ok=True)
    private.start_empty(log)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    streams.confide(payload)
    _work(store, payload, rank)
    return 0


def _work(store: Any, payload: dict[str, Any], rank: int) -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.errors import record

    from trainer.config.instantiate import locate
    from trainer.strategies.contract import Seat

    local = int(os.environ["LOCAL_RANK"])
    device = f"cuda:{local}" if payload["plan"]["device"] == "cuda" else "cpu"
    world, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    entry = locate(payload["plan"]["entries"]["worker"])

    def work(seat: Seat) -> dict[str, Any]:
        try:
            return entry(seat, payload)  # type: ignore[no-any-return]
        except (RunFailed, UserError, Interrupted):
            raise
        except Exception:  # torchrun shows it and keeps it in a file: without what the config hides
            told = text(traceback.format_exc(), values(payload["config"]))
            raise RunFailed(f"worker {rank}:\n{told}") from None

    outcome: dict[str, Any] = record(work)(Seat("worker", rank, world, local, here, device, store))  # type: ignore[assignment]
    return outcome
