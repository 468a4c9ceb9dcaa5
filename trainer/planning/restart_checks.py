"""Checks whether hosts of a run can come and go (launch.nnodes=MIN:MAX), and whether it can skip or rewind numbers that
are not finite (``on_nonfinite``)."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config import schema
from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.host import torchrun
from trainer.planning.batches import CONTIGUOUS
from trainer.planning.checked_config import Checked
from trainer.planning.plan import GEO
from trainer.strategies.contract import Declaration

EACH = ("limit_train_batches", "max_steps")
"""Keys that count batches or updates of each worker."""
STRATEGIES = ("pserver_async", "pserver_ssp", GEO)
"""Strategies without a common step that resume with another number of workers."""
STARTERS = (str(schema.LaunchConfig._target_), str(schema.ForkserverLaunch._target_))
"""Launchers that can restart all processes of a run."""


def check_elastic(config: RunConfig, declaration: Declaration) -> None:
    """Refuse launch.nnodes=MIN:MAX for a run that could not go on with another number of hosts.

    Raises:
        UserError: it could not.
    """
    launch = config.launch
    if launch.least_nnodes is None:
        return
    what = f"launch.nnodes={launch.least_nnodes}:{launch.nnodes}"
    for why, instead in _reasons(config, declaration):
        raise UserError(what, why, instead)


def _reasons(config: RunConfig, declaration: Declaration) -> Iterator[tuple[str, str]]:
    """Yield the reasons why not, and what to type instead."""
    launch, traits, kept = config.launch, declaration.traits, config.checkpoint
    least, most = launch.least_nnodes, launch.nnodes
    assert least is not None
    stay = f"launch.nnodes={most}"
    if least > most:
        yield "MIN is more than MAX", f"launch.nnodes={most}:{least}"
    if config.mode != "train":
        yield f"mode={config.mode} has no checkpoint from which other hosts could go on", stay
    if launch.role is not None or launch.ips is not None:
        how = "launch.ips" if launch.ips is not None else "launch.role"
        yield f"{how} says which hosts there are", f"{how}=null launch.node_rank=N launch.master_addr=ADDRESS"
    if torchrun.is_rank():
        yield f"{torchrun.starter_of()} has started the processes already", "torchrun --nnodes=MIN:MAX"
    if launch.workers is not None:
        yield "launch.workers is their number on all hosts, which changes", "launch.workers=null launch.nproc=N"
    if declaration.name in STRATEGIES:
        yield from _of_each(config, declaration)
    elif not traits.lockstep:
        yield (
            f"strategy={declaration.name} has workers with states of their own, whose number stays",
            "strategy=pserver_sync",
        )
    elif traits.survives:
        yield "strategy.on_lost_worker=continue goes on without lost workers by itself", "strategy.on_lost_worker=stop"
    elif not (traits.same_everywhere or traits.replicas):
        yield f"strategy={declaration.name} cannot go on with another number of workers", "strategy=collective"
    if not (kept.every_steps or kept.every_minutes or kept.every_epochs):
        yield "without checkpoints there is nothing to go on from", "checkpoint=auto"
    if config.sampler.padding == CONTIGUOUS:
        yield (
            f"sampler.padding={CONTIGUOUS} has another order of samples with another number of workers",
            "sampler.padding=strided",
        )
    if launch._target_ not in STARTERS:
        yield f"launch._target_={launch._target_} starts processes once", "launch=local"


def _of_each(config: RunConfig, declaration: Declaration) -> Iterator[tuple[str, str]]:
    """Yield the reasons for workers without a common step, each with a state of its own."""
    if not declaration.leased(config):
        yield "data.work=static gives each worker its own part of an epoch, so their number stays", "data.work=leased"
    if config.data.global_batch_size is not None:
        yield "data.global_batch_size would change the batches that are handed out", "data.batch_size=N"
    for key in EACH:
        if (value := getattr(config, key)) is not None:
            yield f"{key}={value} counts those of each worker, whose number changes", f"{key}=null"


STOP = "on_nonfinite=stop"


def check_nonfinite(checked: Checked) -> None:
    """Refuse ``on_nonfinite=skip`` or ``rewind`` for a run that cannot do it.

    Raises:
        UserError: it cannot.
    """
    config, declaration = checked.config, checked.declaration
    what, kept = f"on_nonfinite={config.on_nonfinite}", config.checkpoint
    if not declaration.traits.skips:
        why = f"with strategy={declaration.name} a worker's update cannot be left out: the optimizer is elsewhere"
        raise UserError(what, why, f"{STOP} (or strategy=collective)")
    if config.on_nonfinite == "skip":
        if (hook := config.node("strategy").get("comm_hook")) in ("powersgd", "dgc"):
            why = (
                f"what strategy.comm_hook={hook} leaves out of a gradient that is not finite would spoil the next ones"
            )
            raise UserError(what, why, "on_nonfinite=rewind (or strategy.comm_hook=none)")
        return
    if not checked.restartable or config.launch.nnodes > 1:
        why = "the run goes back by a restart of its processes, which are all on one host and not started by torchrun"
        raise UserError(what, why, "on_nonfinite=skip")
    if not (kept.every_steps or kept.every_minutes or kept.every_epochs):
        why = "without checkpoints there is nothing to go back to"
        raise UserError(what, why, "checkpoint=auto (or on_nonfinite=skip)")
