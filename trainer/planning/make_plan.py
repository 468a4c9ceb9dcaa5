"""Makes the plan of a run: decides everything that a checked config leaves open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from trainer.config import schema
from trainer.config.instantiate import call_target
from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.host.addresses import with_port
from trainer.metrics.best import best_metric
from trainer.optim.schedules import Plateau
from trainer.planning.auto import Chosen, Machine, ModelFacts, choose
from trainer.planning.checked_config import Checked
from trainer.planning.data_checks import stream_reading
from trainer.planning.eval_and_predict import evaluated_samples
from trainer.planning.plan import Plan, Predicted
from trainer.planning.processes import Process, processes_of, transport_of
from trainer.planning.restart_checks import restartable
from trainer.planning.run_secret import is_insecure
from trainer.planning.tracking_store import tracking_uri
from trainer.planning.training_checks import concern_of, found_loss
from trainer.wording import counted

SCHEDULES = "trainer.optim.schedules."
"""Where schedules are that tell what a run is too short for."""
ENTRIES = {
    "train": "trainer.worker.train:train",
    "eval": "trainer.worker.evaluate:evaluate_weights",
    "predict": "trainer.worker.predict:predict",
}
"""Where a worker enters, by mode."""
UNSAID = "(host 0's address, launch.master_addr)"
MOST_LATE_MOMENTUM = 0.5
"""digits_lenet with 3 workers of pserver_async learns with it; with 0.9 its loss stays where it began."""


def _late_momentum(checked: Checked) -> str:
    """A warning where late gradients and momentum add up; usually empty."""
    momentum = checked.config.optimizer.get("momentum") or 0.0
    if not (checked.declaration.traits.alone and checked.workers > 1 and momentum > MOST_LATE_MOMENTUM):
        return ""
    return (
        f"optimizer.momentum={momentum:g} with {checked.workers} workers that push apart: late gradients act "
        f"as more momentum, and the loss may not fall "
        f"(optimizer.momentum={MOST_LATE_MOMENTUM:g} is what to try first)"
    )


def _concern(checked: Checked, model: ModelFacts, steps_per_epoch: int, total: int) -> str:
    """What runs and is probably a mistake; usually empty."""
    short = _short_run(checked.config, steps_per_epoch, total)
    loss = concern_of(checked.config, model.denominator)
    said = [model.concern, loss, _late_momentum(checked), checked.classes.said, checked.head, *short]
    return "; ".join(filter(None, said))


def _short_run(config: RunConfig, steps_per_epoch: int, total: int) -> Iterator[str]:
    """Yield what of a schedule of ours the run is too short for; a user's own class is called in the workers alone."""
    node, told = config.node("scheduler"), config.execution
    if config.mode != "train" or not total or not str(node.get("_target_")).startswith(SCHEDULES):
        return
    schedule = call_target(node, "scheduler", total_steps=total, steps_per_epoch=steps_per_epoch)
    yield from schedule.concerns()
    if isinstance(schedule, Plateau) and config.validation:
        every = [told.val_every_steps or 0, (told.val_every or 0) * steps_per_epoch]
        steps = {step for some in every if some for step in range(some, total + 1, some) if step >= schedule.warmup}
        looks = len(steps | {total})
        if looks < schedule.patience + 2:  # the first one is the best so far
            yield (
                f"scheduler.patience={schedule.patience} is as long as the run ({counted(looks, 'validation')}): "
                f"the learning rate never falls"
            )


def make_plan(checked: Checked, model: ModelFacts, machine: Machine, run_dir: str) -> Plan:
    """Make the plan of a run: decide everything that a checked config leaves open.

    Raises:
        UserError: the run would take no step.
    """
    config, facts, workers, launch = checked.config, checked.facts, checked.workers, checked.config.launch
    chosen, why = _chosen(checked, model, machine, facts.slow or checked.sees_pictures)
    epochs, steps_per_epoch, total = _length(checked) if config.mode == "train" else _looks(checked)
    roles = checked.declaration.roles(workers, launch)
    processes = processes_of(roles, launch, checked.device)
    return Plan(
        name=config.name,
        mode=config.mode,
        strategy=checked.declaration.name,
        strategy_worker=checked.declaration.worker,
        traits=checked.declaration.traits,
        leased=checked.leased,
        entries={**checked.declaration.entries, "worker": ENTRIES[config.mode]},
        roles=roles,
        nnodes=launch.nnodes,
        node_rank=launch.node_rank,
        processes=processes,
        device=checked.device,
        endpoint=_endpoint(launch),
        batch_size=config.batch_size,
        merge=checked.merge,
        global_batch_size=checked.global_batch_size,
        val_batch_size=config.data.val_batch_size or config.batch_size,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        total_steps=total,
        lr=None if config.optimizer.get("lr") is None else config.optimizer["lr"] * checked.lr_factor,
        lr_factor=checked.lr_factor,
        update_batch=checked.update_batch,
        best=best_metric(config, facts.task) if config.validation else "",
        parameters=model.parameters,
        facts=facts,
        preprocessing=checked.source.image_preprocessing(facts),
        chosen=chosen,
        why=why,
        run_dir=run_dir,
        tracking=tracking_uri(config.tracking),
        environment={role: _environment(launch, role, processes) for role in roles},
        lacks=list(checked.lacks),
        concern=_concern(checked, model, steps_per_epoch, total),
        insecure=is_insecure(config, roles),
        lower=model.lower,
        buckets=model.buckets,
        **_of_weights(checked),
        launcher="" if launch._target_ == schema.LaunchConfig._target_ else str(launch._target_),
        stream=stream_reading(config, facts),
        restarts=launch.max_restarts if restartable(checked) else 0,
        by_role=launch.role is not None,
        least_nnodes=launch.least_nnodes or 0,
        lease_batches=_lease_batches(checked),
        drops_lost=config.data.on_lost_worker == "drop",
        transport=transport_of(config, roles),
        **found_loss(checked, model.denominator),
    )


def _chosen(checked: Checked, model: ModelFacts, machine: Machine, slow: bool) -> tuple[Chosen, dict[str, str]]:
    """What ``auto`` stands for, and the reasons; of a plan for other hosts, as far as this machine can know.

    Args:
        slow: a sample takes long to read.
    """
    config = checked.config
    machine = replace(machine, cores=None) if checked.elsewhere else machine
    chosen, why = choose(config, checked.device, model, machine, checked.nproc, slow, config.batch_size)
    if checked.elsewhere and checked.device == "cpu" and "precision" in why:
        why["precision"] += ", if the hosts' is like it"
    if checked.searches:
        why |= {"batch_size": "the most that fits is searched for before the training; until then this is a guess"}
    if checked.auto_strategy:
        why["strategy"] = checked.auto_strategy
    return chosen, why


def _of_weights(checked: Checked) -> dict[str, Any]:
    """What is measured or predicted besides: with which weights and classes in mode=eval and predict, the test in a
    training."""
    config, told, each = checked.config, checked.config.predict, "image" if checked.sees_pictures else "row"
    predict = Predicted(str(told.input), checked.samples, each, told.output) if config.mode == "predict" else None
    tests = config.mode == "train" and config.test and bool(checked.facts.test_samples or checked.facts.iterable)
    labels, limit = [*checked.classes.labels], config.limit_val_batches or 0
    return {"weights": config.weights or "", "labels": labels, "predict": predict, "tests": tests, "limit_val": limit}


def _length(checked: Checked) -> tuple[int, int, int]:
    """Epochs, updates of an epoch, and of the whole training."""
    config, samples, workers = checked.config, checked.facts.train_samples, checked.workers
    size = config.batch_size
    batches = _count_batches(config, samples, size, workers, checked.leased)
    batches = min(batches, config.limit_train_batches or batches)
    steps_per_epoch = ceil(batches / checked.merge)
    total = config.max_steps or config.epochs * steps_per_epoch
    epochs = ceil(total / steps_per_epoch) if steps_per_epoch else config.epochs
    if checked.leased and config.max_steps and steps_per_epoch:  # an epoch's last round may be uneven
        together = _count_batches(config, samples, size, 1, True)
        together = min(together, (config.limit_train_batches or together) * workers)
        epochs = ceil(total * workers / ceil(together / checked.merge))
    if not steps_per_epoch and not checked.lacks:
        raise UserError(f"data.batch_size={size}", "not one batch can be made of the training data")
    return epochs, steps_per_epoch, total


def _lease_batches(checked: Checked) -> int:
    """Batches in a leased block, which holds whole updates."""
    config, facts = checked.config, checked.facts
    if not checked.leased or facts.streams or config.mode != "train":
        return 0
    everything = _count_batches(config, facts.train_samples, config.batch_size, 1, True)
    return config.data.lease_batches or max(1, min(64, everything // (8 * checked.workers)))


def _looks(checked: Checked) -> tuple[int, int, int]:
    """The same where nothing is trained: one pass, its batches of each worker."""
    config = checked.config
    samples = checked.samples or evaluated_samples(config, checked.facts)
    batches = ceil(ceil(samples / checked.workers) / config.batch_size)
    if config.mode == "eval":
        batches = min(batches, config.limit_val_batches or batches)
    return 1, batches, batches


def _count_batches(config: RunConfig, samples: int, batch_size: int, workers: int, leased: bool) -> int:
    """The number of batches per worker and epoch; if work is leased, the average rounded up."""
    from trainer.data.sampler import DistributedBatchSampler, training_sampler

    if leased:
        everything = DistributedBatchSampler(samples, batch_size, drop_last=config.sampler.drop_last, pad=False)
        return ceil(len(everything) / workers)
    return len(training_sampler(config, samples, batch_size, 0, workers))


def _meeting_address(launch: schema.LaunchConfig) -> str:
    """The address where the run's processes meet; a placeholder if the first host has no name yet."""
    unsaid = launch.nnodes > 1 and launch.role is None and launch.master_addr == schema.LaunchConfig.master_addr
    return UNSAID if unsaid else str(launch.master_addr)


def _endpoint(launch: schema.LaunchConfig) -> str:
    """Where the processes meet, on one host or between hosts."""
    if launch.nnodes > 1:
        return with_port(_meeting_address(launch), launch.master_port)
    return "a folder that no other user can enter"


def _environment(launch: schema.LaunchConfig, role: str, processes: Sequence[Process]) -> dict[str, str]:
    nodes = [process.node for process in processes if process.role == role]
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(len(nodes)),
        "LOCAL_WORLD_SIZE": str(nodes.count(min(nodes, default=0))),
        "MASTER_ADDR": _meeting_address(launch),
        "MASTER_PORT": str(launch.master_port or "chosen at the start"),
    }
