"""Whether asynchronous workers and their servers can resume from a checkpoint of other numbers of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.checkpoint import store
from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.wording import counted

if TYPE_CHECKING:
    from trainer.planning.plan import Plan

EACH = ("limit_train_batches", "max_steps")
"""Keys that count batches or updates of each worker."""
GEO = "pserver_geo"
STRATEGIES = ("pserver_async", "pserver_ssp", GEO)
"""Of workers without a common step; a user's own does not know of other numbers."""


def other_workers(plan: Plan, about: store.About) -> bool:
    """Whether an asynchronous run resumes with another number of workers."""
    return plan.strategy in STRATEGIES and about.workers != plan.workers


def _other_processes(plan: Plan, about: store.About) -> bool:
    """Whether an asynchronous run resumes with another number of workers or servers."""
    servers = plan.roles.get("server", 0)
    return plan.strategy in STRATEGIES and (about.workers, about.servers) != (plan.workers, servers)


def _batch(about: store.About, merge: int) -> int:
    """The batch size of one worker in the run that wrote the checkpoint."""
    return about.global_batch_size // (about.workers * merge)


def check(config: RunConfig, plan: Plan, about: store.About, folder: Path) -> None:
    """Refuse to resume with another number of workers if that does not fit the blocks leased before.

    Raises:
        UserError: it does not.
    """
    if not plan.leased:
        why = f"{folder} has {counted(about.workers, 'worker')}, each with its own part of an epoch (data.work=static)"
        raise UserError(f"{plan.workers} workers", why, f"launch.workers={about.workers}")
    if (before := _batch(about, plan.merge)) != plan.batch_size:
        why = (
            f"a batch has {plan.batch_size} samples, and had {before} in {folder}; work is handed out in blocks "
            f"of batches"
        )
        raise UserError(f"{plan.workers} workers", why, f"data.batch_size={before}")
    for key in EACH:
        told, now = about.config.get(key), getattr(config, key)
        if told is not None and told * about.workers != (now or 0) * plan.workers:
            together = told * about.workers
            why = (
                f"it counts those of each worker, and {folder} is of {counted(about.workers, 'worker')} with "
                f"{told} each"
            )
            even = (
                f"{key}={together // plan.workers}"
                if together % plan.workers == 0
                else f"launch.workers={about.workers}"
            )
            raise UserError(f"{key}={now}", why, even)


def counts_for_others(plan: Plan, about: store.About, key: str) -> bool:
    """Whether a resumed asynchronous run has another value of a key only because it has more or fewer workers."""
    return other_workers(plan, about) and key in EACH and about.config.get(key) is not None


def lost(plan: Plan, about: store.About) -> Iterator[str]:
    """Yield one line for everything that begins anew with another number of workers or servers."""
    if about.workers == plan.workers and 0 < about.lease_batches != plan.lease_batches:
        yield f"blocks of {plan.lease_batches} batches: those of the run stay at {about.lease_batches}"
    if plan.leased and about.config.get("max_steps") and _is_cut(plan, about):
        yield (
            f"the rest of the epoch that max_steps={about.config.get('max_steps')} has cut: its blocks were "
            f"counted then, and the next epoch follows"
        )
    if not _other_processes(plan, about):
        return
    if plan.strategy == GEO:
        yield (
            "what tells the replicas of workers apart: all begin with the servers' parameters, and train again on "
            "what they had not exchanged"
        )
        yield "what the workers' optimizers remember of rows"
    if float(about.config.get("strategy", {}).get("delay_compensation") or 0.0):
        yield "the parameters that workers had pulled: a gradient of the first update is not compensated"


def _is_cut(plan: Plan, about: store.About) -> bool:
    """Whether the run before was to end inside the epoch in which the checkpoint is, or before that, and this one goes
    on."""
    whole, rest = divmod(about.total_steps, plan.steps_per_epoch)
    return plan.total_steps > about.total_steps and bool(rest) and about.epoch >= whole


def other_numbers(plan: Plan, about: store.About) -> Iterator[str]:
    """Yield why updates differ from before, if pserver_geo's workers or servers are now more or fewer."""
    if plan.strategy == GEO and _other_processes(plan, about):
        now = plan.roles.get("server", 0)
        yield (
            f"the run had {counted(about.workers, 'worker')} and {counted(about.servers, 'server')}, and has "
            f"{plan.workers} and {now}; each worker has a replica of its own"
        )
