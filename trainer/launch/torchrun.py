"""``torchrun ... -m trainer +recipe=X``: rank 0 is the parent, composes once, and hands the finished config to the ranks."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer import streams
from trainer.confidential import text, values
from trainer.errors import Interrupted, RunFailed, UserError
from trainer.host import private
from trainer.launch.handover import Handover, handover


def present() -> bool:
    """Whether this process is one of torchrun's."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def join(parse: Callable[[], argparse.Namespace]) -> int:
    """Run as one of torchrun's ranks; returns the exit code.

    Args:
        parse: the command line's flags and overrides, asked of rank 0 alone.
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
        _lead(way, store, parse())
    except (UserError, RunFailed, Interrupted) as error:
        way.stop(str(error))
        raise
    way.stop("")
    return 0


def _lead(way: Handover, store: Any, args: argparse.Namespace) -> None:
    """Rank 0: the parent, and a worker."""
    from trainer import compose, service
    from trainer.launch.here import teed

    if args.multirun or args.cfg or args.info:
        raise UserError("torchrun", "runs one job; sweeps and --cfg start without it", "python -m trainer ...")
    size, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    topology = [f"launch.nproc={local}", *([f"launch.nnodes={size // local}"] if size > local else [])]
    ignored = ["launch.nnodes=1"] * (size == local) + ["launch.ips=null", "launch.workers=null"]

    def start(plan: Any, payload: dict[str, Any], run_dir: Path) -> dict[str, Any]:
        if set(plan.roles) != {"worker"}:
            raise RunFailed(f"torchrun starts workers alone; strategy={plan.strategy} has {', '.join(plan.roles)}")
        handed = way.give(payload)
        with streams.log(run_dir / "workerlog.0") as log, teed(log, payload["config"]["verbosity"] == "quiet"):
            return _work(store, handed, 0)

    with compose.hydra_app(args.config_dir) as app:
        overrides, flags = [*args.overrides, *topology], compose.flags(args)
        service.run_one(app, overrides, args.config_name or "config", start, flags, ignored)


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

    from trainer.build import locate
    from trainer.strategies.base import Seat

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
