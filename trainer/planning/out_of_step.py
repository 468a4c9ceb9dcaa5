"""Whether workers without a common step, and their servers, can go on from a checkpoint of other numbers of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainer.checkpoint import store
from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.planning.plan import Plan
from trainer.wording import counted

EACH = ("limit_train_batches", "max_steps")
"""Keys that count batches or updates of each worker."""
GEO = "pserver_geo"
STRATEGIES = ("pserver_async", "pserver_ssp", GEO)
"""Of workers without a common step; a user's own does not know of other numbers."""


def other_workers(plan: Plan, about: store.About) -> bool:
    """Whether more or fewer workers of one of these strategies go on."""
    return plan.strategy in STRATEGIES and about.workers != plan.workers


def other_processes(plan: Plan, about: store.About) -> bool:
    """Whether more or fewer workers or servers of one of these strategies go on."""
    servers = plan.roles.get("server", 0)
    return plan.strategy in STRATEGIES and (about.workers, about.servers) != (plan.workers, servers)


def batch(about: store.About, merge: int) -> int:
    """Samples of a batch of one worker."""
    return about.global_batch_size // (about.workers * merge)


def check(config: RunConfig, plan: Plan, about: store.About, folder: Path) -> None:
    """Of other workers, refuse what does not fit the blocks that the checkpoint's servers have handed out.

    Raises:
        UserError: it does not.
    """
    if not plan.leased:
        why = f"{folder} has {counted(about.workers, 'worker')}, each with its own part of an epoch (data.work=static)"
        raise UserError(f"{plan.workers} workers", why, f"launch.workers={about.workers}")
    if (before := batch(about, plan.merge)) != plan.batch_size:
        why = f"a batch has {plan.batch_size} samples, and had {before} in {folder}; work is handed out in blocks of batches"
        raise UserError(f"{plan.workers} workers", why, f"data.batch_size={before}")
    for key in EACH:
        told, now = about.config.get(key), getattr(config, key)
        if told is not None and told * about.workers != (now or 0) * plan.workers:
            together = told * about.workers
            why = f"it counts those of each worker, and {folder} is of {counted(about.workers, 'worker')} with {told} each"
            even = (
                f"{key}={together // plan.workers}"
                if together % plan.workers == 0
                else f"launch.workers={about.workers}"
            )
            raise UserError(f"{key}={now}", why, even)


def counts_for_others(plan: Plan, about: store.About, key: str) -> bool:
    """Whether another value of a key only comes of another number of workers; :func:`check` has seen to it that it does."""
    return other_workers(plan, about) and key in EACH and about.config.get(key) is not None


def lost(plan: Plan, about: store.About) -> Iterator[str]:
    """What begins anew with other workers or servers, each a line."""
    if about.workers == plan.workers and 0 < about.lease_batches != plan.lease_batches:
        yield f"blocks of {plan.lease_batches} batches: those of the run stay at {about.lease_batches}"
    if not other_processes(plan, about):
        return
    if plan.strategy == GEO:
        yield "what tells the replicas of workers apart: all begin with the servers' parameters, and train again on what they had not exchanged"
        yield "what the workers' optimizers remember of rows"
    if float(about.config.get("strategy", {}).get("delay_compensation") or 0.0):
        yield "the parameters that workers had pulled: a gradient of the first update is not compensated"


def other_numbers(plan: Plan, about: store.About) -> Iterator[str]:
    """Why the updates are others where workers have replicas of their own."""
    if plan.strategy == GEO and other_processes(plan, about):
        now = plan.roles.get("server", 0)
        yield f"the run had {counted(about.workers, 'worker')} and {counted(about.servers, 'server')}, and has {plan.workers} and {now}; each worker has a replica of its own"
