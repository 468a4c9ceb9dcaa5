"""``torchrun ... -m trainer +recipe=X``: rank 0 is the parent, composes once, and hands the finished config to the ranks."""

from __future__ import annotations

import argparse
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.errors import Interrupted, RunFailed, UserError


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
    if rank:
        return _follow(store, rank)
    from trainer import compose, service
    from trainer.launch.here import teed

    args = parse()
    if args.multirun or args.cfg or args.info:
        store.set("payload", pickle.dumps("--multirun, --cfg and --info run without torchrun"))
        raise UserError("torchrun", "runs one job; sweeps and --cfg start without it", "python -m trainer ...")
    size, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    topology = [f"launch.nproc={local}", f"launch.nnodes={size // local}", "launch.ips=null", "launch.workers=null"]

    def start(plan: Any, payload: dict[str, Any], run_dir: Path) -> dict[str, Any]:
        if set(plan.roles) != {"worker"}:
            raise RunFailed(f"torchrun starts workers alone; strategy={plan.strategy} has {', '.join(plan.roles)}")
        store.set("payload", pickle.dumps(payload))
        with (run_dir / "workerlog.0").open("w") as log, teed(log):
            return _work(store, payload, rank)

    try:
        with compose.hydra_app(args.config_dir) as app:
            service.run_one(app, [*args.overrides, *topology], args.config_name or "config", start, compose.flags(args))
    except (UserError, RunFailed, Interrupted) as error:
        store.set("payload", pickle.dumps(str(error)))
        raise
    else:
        store.set("payload", pickle.dumps(""))
    return 0


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


def _follow(store: Any, rank: int) -> int:
    """Any other rank: wait for the finished config; a text instead says that there is nothing to do."""
    payload = pickle.loads(store.get("payload"))
    if isinstance(payload, str):
        return UserError.exit_code if payload else 0
    log = Path(payload["run_dir"]) / f"workerlog.{rank}"
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
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
    outcome: dict[str, Any] = record(entry)(Seat("worker", rank, world, local, here, device, store), payload)  # type: ignore[assignment]
    return outcome
