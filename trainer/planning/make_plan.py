"""Makes the plan of a run: decides everything that a checked config leaves open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil

from trainer.config import schema
from trainer.config.instantiate import call_target
from trainer.config.own_code import own_code
from trainer.config.run_config import RunConfig
from trainer.config.schema.run import MLFLOW
from trainer.errors import UserError
from trainer.host.addresses import with_port
from trainer.metrics.best import AVERAGED, RAW
from trainer.optim.schedules import Plateau
from trainer.planning.auto import Machine, ModelFacts, choose, compiled
from trainer.planning.checked_config import Checked
from trainer.planning.chosen import Chosen
from trainer.planning.data_checks import stream_reading
from trainer.planning.plan import (
    Batches,
    DataPlan,
    Length,
    ModelPlan,
    Objective,
    Paths,
    Plan,
    Predicted,
    Remarks,
    StrategyPlan,
    Topology,
)
from trainer.planning.precision import FP16
from trainer.planning.processes import Process, processes_of, transport_of
from trainer.planning.reading import check_resident, shortage, taken_by
from trainer.planning.training_checks import concern_of, loss_in_words
from trainer.tasks.contract import best_metric, task_of
from trainer.wording import counted

SCHEDULES = "trainer.optim.schedules."
"""Module of the schedules with ``concerns()``."""
ENTRIES = {
    "train": "trainer.worker.train:train",
    "eval": "trainer.worker.evaluate:evaluate_weights",
    "predict": "trainer.worker.predict:predict",
}
"""Entry function of a worker, by mode."""
UNSAID = "(host 0's address, launch.master_addr)"
MOST_LATE_MOMENTUM = 0.5
"""With it digits_lenet learns on 3 workers of pserver_async; with 0.9 its loss does not fall."""


def _late_momentum(checked: Checked) -> str:
    """A warning if late gradients add to the momentum; usually empty."""
    momentum = checked.config.optimizer.get("momentum") or 0.0
    if not (checked.declaration.traits.alone and checked.workers > 1 and momentum > MOST_LATE_MOMENTUM):
        return ""
    return (
        f"optimizer.momentum={momentum:g} with {checked.workers} workers that push apart: late gradients act "
        f"as more momentum, and the loss may not fall "
        f"(optimizer.momentum={MOST_LATE_MOMENTUM:g} is what to try first)"
    )


LARGE_BATCH = ("Lars", "Lamb")
"""Optimizers with a rate for each layer (You et al., 2017, arXiv:1708.03888; 2020, arXiv:1904.00962)."""
SCHEDULE_FREE = "trainer.optim.schedule_free."
LARGE = 1024
"""Samples of an update from which they were shown to help."""


def _small_batch(checked: Checked) -> str:
    """A warning about an optimizer for large batches with a small one; usually empty."""
    name, size = str(checked.config.optimizer.get("_target_")).rpartition(".")[2], checked.update_batch
    if name not in LARGE_BATCH or size >= LARGE:
        return ""
    usual = "momentum" if name == "Lars" else "adamw"
    return (
        f"an update of {size} samples is small for {name.upper()}, which its authors have shown from {LARGE} on "
        f"(optimizer={usual} is what to try first)"
    )


def _schedule_free(checked: Checked, model: ModelFacts) -> Iterator[str]:
    """Yield warnings about what spoils the average of schedule-free optimizers."""
    config = checked.config
    if config.mode != "train" or not str(config.optimizer.get("_target_")).startswith(SCHEDULE_FREE):
        return
    name = str(config.node("scheduler").get("_target_")).rpartition(".")[2]
    if name != "Constant":
        yield f"a rate that falls ({name}) makes the average of schedule_free old (scheduler=constant is meant for it)"
    if norms := [norm for norm in model.norms if "BatchNorm" in norm]:
        yield (
            f"{norms[0]} keeps statistics of the trained weights, and schedule_free validates their average: the "
            f"validation may be worse than the model"
        )


def _concern(checked: Checked, model: ModelFacts, machine: Machine, length: Length, chosen: Chosen) -> str:
    """Warnings about settings that run but are probably a mistake; usually empty."""
    short = _short_run(checked.config, length.steps_per_epoch, length.total_steps)
    loss = concern_of(checked.config, model.denominator)
    gpus = [machine.about_gpus.concern, _too_few_gpus(checked, machine)] if checked.device == "cuda" else []
    takes = taken_by(machine.gpus[: checked.nproc], chosen.precision, model.flops)
    short_of_data = shortage(checked.facts, chosen.decode, chosen.num_workers, model.reads, takes)
    said = [
        *gpus,
        model.concern,
        loss,
        _late_momentum(checked),
        _small_batch(checked),
        checked.declaration.concern(model.sizes),
        *_schedule_free(checked, model),
        checked.classes.said,
        checked.head,
        short_of_data,
    ]
    said += short
    return "; ".join(filter(None, said))


def _too_few_gpus(checked: Checked, machine: Machine) -> str:
    """What a plan for GPUs of another machine should say; empty where this one has enough, or does not start it."""
    config, found = checked.config, len(machine.gpus)
    if not config.plan or config.launch.nnodes > 1 or "dry_run" in config.node("launch") or checked.nproc <= found:
        return ""
    shows = f"only {counted(found, 'GPU')}" if found else machine.about_gpus.why or "no GPU"
    return f"the plan is for another machine, and the run would be refused on this one: {shows}"


def _short_run(config: RunConfig, steps_per_epoch: int, total: int) -> Iterator[str]:
    """Yield the parts of a built-in schedule for which the run is too short. A user's own class is called only in
    workers."""
    node, execution = config.node("scheduler"), config.execution
    if config.mode != "train" or not total or not str(node.get("_target_")).startswith(SCHEDULES):
        return
    schedule = call_target(node, "scheduler", total_steps=total, steps_per_epoch=steps_per_epoch)
    yield from schedule.concerns()
    if isinstance(schedule, Plateau) and config.validation:
        every = [execution.val_every_steps or 0, (execution.val_every or 0) * steps_per_epoch]
        steps = {step for some in every if some for step in range(some, total + 1, some) if step >= schedule.warmup}
        looks = len(steps | {total})
        if looks < schedule.patience + 2:  # the first one is the best so far
            yield (
                f"scheduler.patience={schedule.patience} is as long as the run ({counted(looks, 'validation')}): "
                f"the learning rate never falls"
            )


def make_plan(checked: Checked, model: ModelFacts, machine: Machine, paths: Paths) -> Plan:
    """Make the plan of a run: decide everything that a checked config leaves open.

    Args:
        paths: the run's folder, and where it was started.

    Raises:
        UserError: the run would take no step.
    """
    config, facts = checked.config, checked.facts
    chosen, why = _chosen(checked, model, machine, facts.slow or checked.sees_pictures)
    with checked.lacks:
        check_resident(config, facts, checked.device, machine.gpus[: checked.nproc])
    length = _training_length(checked) if config.mode == "train" else _evaluation_length(checked)
    servers = "server" in checked.declaration.entries
    how, reasons = compiled(config, checked.device, model, machine, checked.nproc, length.total_steps, servers)
    chosen, why = replace(chosen, compiling=how, cuda_graph=config.execution.cuda_graph), why | reasons
    if chosen.cuda_graph:
        from trainer.planning.cuda_graph import check_capture

        with checked.lacks:
            check_capture(checked, model, chosen)
    return Plan(
        mode=config.mode,
        strategy=StrategyPlan(
            name=checked.declaration.name,
            worker=checked.declaration.worker,
            traits=checked.declaration.traits,
            entries={**checked.declaration.entries, "worker": ENTRIES[config.mode]},
            transport=transport_of(config, checked.declaration.roles(checked.workers, config.launch)),
            exchange=checked.declaration.exchange(model.sizes, 8 if chosen.precision == "fp64" else 4),
            buckets=None if how.compile else model.buckets,  # the compiler orders the gradients
        ),
        topology=_topology(checked),
        batches=_batches(checked),
        length=length,
        chosen=chosen,
        data=DataPlan(
            facts=facts,
            preprocessing=checked.source.image_preprocessing(facts),
            stream=stream_reading(config, facts),
            labels=[*checked.classes.labels],
            predict=_predicted(checked),
        ),
        model=ModelPlan(model.parameters, config.weights or "", model.part, model.rules),
        objective=_objective(checked, model),
        paths=replace(paths, name=config.name, tracking=_tracking_uri(config), own_code=own_code(config)),
        remarks=Remarks(why, list(checked.lacks), concern=_concern(checked, model, machine, length, chosen)),
    )


def _topology(checked: Checked) -> Topology:
    """The run's processes and hosts."""
    launch, roles = checked.config.launch, checked.declaration.roles(checked.workers, checked.config.launch)
    processes = processes_of(roles, launch, checked.device)
    return Topology(
        roles=roles,
        processes=processes,
        device=checked.device,
        endpoint=_endpoint(launch) + _own_address(checked),
        environment={role: _environment(launch, role, processes) for role in roles},
        nnodes=launch.nnodes,
        node_rank=launch.node_rank,
        least_nnodes=launch.least_nnodes or 0,
        launcher="" if launch._target_ == schema.LaunchConfig._target_ else str(launch._target_),
        restarts=launch.max_restarts if checked.restartable else 0,
        by_role=launch.role is not None,
        insecure=_is_insecure(checked.config, roles),
    )


def _own_address(checked: Checked) -> str:
    """This host's address among several hosts, in words; '' on one host, and in a plan alone."""
    launch = checked.config.launch
    if launch.nnodes == 1 or launch.role is not None or checked.config.plan:
        return ""
    from trainer.planning.hosts import own_address

    return f" (this host is {own_address(launch)})"


def _is_insecure(config: RunConfig, roles: Mapping[str, int]) -> bool:
    """Whether servers would accept any program that reaches the launcher's store as a process of the run."""
    if config.launch.nnodes == 1 or not config.launch.insecure or set(roles) == {"worker"}:
        return False
    from trainer.planning.run_secret import has_secret

    return not has_secret(config.launch)


def _tracking_uri(config: RunConfig) -> str:
    """The address of MLflow's tracking store; '' without MLflow."""
    if MLFLOW not in config.tracking.trackers:
        return ""
    from trainer.planning.tracking_store import tracking_uri

    return tracking_uri(config.tracking)


def _batches(checked: Checked) -> Batches:
    """The samples of a batch and of an update, and the learning rate."""
    config, rate = checked.config, checked.config.optimizer.get("lr")
    return Batches(
        size=config.batch_size,
        merge=checked.merge,
        global_size=checked.global_batch_size,
        val_size=config.data.val_batch_size or config.batch_size,
        update_size=checked.update_batch,
        lr=None if rate is None else rate * checked.lr_factor,
        lr_factor=checked.lr_factor,
        leased=checked.leased,
        lease_batches=_lease_batches(checked),
        drops_lost=config.data.on_lost_worker == "drop",
    )


def _objective(checked: Checked, model: ModelFacts) -> Objective:
    """The loss, and what is measured."""
    config, facts, task = checked.config, checked.facts, task_of(checked.config)
    lower = {prefix + name: True for name in task.lower for prefix in (RAW, AVERAGED)}
    return Objective(
        task=task.name,
        best=best_metric(config) if config.validation else "",
        lower={**lower, **model.lower},
        tests=config.mode == "train" and config.test and bool(facts.test_samples or facts.iterable),
        limit_val=config.limit_val_batches or 0,
        denominator=model.denominator,
        loss=loss_in_words(checked, model.denominator),
    )


def _predicted(checked: Checked) -> Predicted | None:
    """What mode=predict reads; None in other modes."""
    config, predict = checked.config, checked.config.predict
    if config.mode != "predict":
        return None
    return Predicted(str(predict.input), checked.samples, "image" if checked.sees_pictures else "row", predict.output)


def _chosen(checked: Checked, model: ModelFacts, machine: Machine, slow: bool) -> tuple[Chosen, dict[str, str]]:
    """What ``auto`` chooses, and the reasons; for other hosts, as far as this machine can know.

    Args:
        slow: a sample takes long to read.
    """
    config = checked.config
    machine = replace(machine, cores=None, variables={}) if checked.elsewhere else machine
    servers = "server" in checked.declaration.entries
    chosen, why = choose(
        config,
        checked.device,
        model,
        machine,
        checked.nproc,
        slow,
        config.batch_size,
        servers,
        undecodable=checked.facts.undecodable,
        without_fp16=without_fp16(checked),
    )
    if checked.elsewhere and checked.device == "cpu" and "precision" in why:
        why["precision"] += ", if the hosts' is like it"
    if checked.elsewhere and "device" in why:
        why["device"] += "; other hosts may differ"
    if checked.searches:
        why |= {"batch_size": "the most that fits is searched for before the training; until then this is a guess"}
    if checked.auto_strategy:
        why["strategy"] = checked.auto_strategy
    if checked.auto_task:
        why["task"] = checked.auto_task
    return chosen, why


def without_fp16(checked: Checked) -> str:
    """Why ``precision=auto`` cannot be fp16: what the strategy says of it; empty: it can."""
    if checked.config.precision != "auto" or checked.config.mode != "train":
        return ""
    if checked.config.execution.cuda_graph:
        return "a captured update cannot ask whether its gradients are finite"
    typed = checked.config.changed(precision=FP16)
    refused = [one for one in checked.declaration.refuse(typed, checked.workers) if one.what == f"precision={FP16}"]
    return refused[0].why if refused else ""


def _training_length(checked: Checked) -> Length:
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
    return Length(epochs, steps_per_epoch, total)


def _lease_batches(checked: Checked) -> int:
    """Batches in a leased block, which holds whole updates."""
    config, facts = checked.config, checked.facts
    if not checked.leased or facts.streams or config.mode != "train":
        return 0
    everything = _count_batches(config, facts.train_samples, config.batch_size, 1, True)
    return config.data.lease_batches or max(1, min(64, everything // (8 * checked.workers)))


def _evaluation_length(checked: Checked) -> Length:
    """Epochs and batches of each worker in mode=eval and mode=predict: one pass."""
    config, facts = checked.config, checked.facts
    samples = checked.samples or (facts.val_samples if config.eval.split == "val" else facts.test_samples)
    batches = ceil(ceil(samples / checked.workers) / config.batch_size)
    if config.mode == "eval":
        batches = min(batches, config.limit_val_batches or batches)
    return Length(1, batches, batches)


def _count_batches(config: RunConfig, samples: int, batch_size: int, workers: int, leased: bool) -> int:
    """The number of batches per worker and epoch; if work is leased, the average rounded up."""
    from trainer.data.sampler import training_sampler, undivided_sampler

    if leased:
        return ceil(len(undivided_sampler(config, samples, batch_size)) / workers)
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
