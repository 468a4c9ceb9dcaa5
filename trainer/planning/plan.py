"""The plan: all processes, roles, devices, endpoints, batches, steps and paths of a run. Pure data, printable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import ceil
from pathlib import Path
from typing import Any

from trainer.config import schema
from trainer.config.instantiate import call_target
from trainer.config.run_config import RunConfig
from trainer.data.source import Facts
from trainer.errors import UserError
from trainer.host.addresses import with_port
from trainer.metrics.best import best_metric
from trainer.optim.schedules import Plateau
from trainer.planning.auto import Buckets, Chosen, Machine, ModelFacts, choose
from trainer.planning.checked_config import Checked
from trainer.planning.elastic import restartable
from trainer.planning.eval_and_predict import evaluated_samples
from trainer.planning.loss_checks import concern_of, found_loss
from trainer.planning.processes import Process, processes_of
from trainer.planning.run_secret import is_insecure
from trainer.planning.stream_checks import how
from trainer.planning.tracking_store import tracking_uri
from trainer.planning.transport import transport_of
from trainer.strategies.contract import Traits
from trainer.wording import counted

MOST_PROCESSES_SHOWN = 16
SCHEDULES = "trainer.optim.schedules."
"""Where schedules are that tell what a run is too short for."""
ENTRIES = {
    "train": "trainer.worker.train:train",
    "eval": "trainer.worker.evaluate:evaluate_weights",
    "predict": "trainer.worker.predict:predict",
}
"""Where a worker enters, by mode."""
UNSAID = "(host 0's address, launch.master_addr)"


@dataclass(frozen=True)
class Predicted:
    """What mode=predict reads: ``samples`` in the folder ``input``, each an ``image`` or a ``row``.
    And the ``output`` that was given."""

    input: str
    samples: int
    each: str
    output: str | None


MAYBE = {"predict": Predicted, "buckets": Buckets}
"""Parts of a plan that only some have."""

MOST_LATE_MOMENTUM = 0.5
"""digits_lenet with 3 workers of pserver_async learns with it; with 0.9 its loss stays where it began."""


@dataclass(frozen=True)
class Plan:
    """The plan of a run: everything that is decided before the first process starts, as pure data.

    Attributes:
        traits: of the strategy; leased: training data is handed out while an epoch lasts, in blocks of
            ``lease_batches`` batches (0: the data have blocks of their own). drops_lost: a lost worker's blocks are
            dropped, and do not go to others.
        weights: the file that is evaluated or predicts; empty in training. batch_size: samples per worker and batch, at
        most; merge: batches per update; global_batch_size: samples per update. steps_per_epoch, total_steps: updates.
        val_batch_size: samples per worker and evaluation batch. facts: of the data. preprocessing: what validation does
        to an image, see ``DataSource.image_preprocessing``; empty: samples are none. chosen: precision, channels_last,
        ... as used; why: reasons of those that ``auto`` chose. lr: optimizer.lr as it is used, scaled to the batch
        where that is asked for; None: the optimizer has no such key. lr_factor: what it is scaled by; update_batch: for
        how many samples per update. best: the validation metric that marks the best model; empty: none does, because
        nothing is validated. tests: test samples are measured at the end of the training. limit_val: batches of a split
        that a worker measures; 0: all. lower: of the user's own metrics whose class says so, whether less is better.
        endpoint: where the processes meet. environment: the variables of each role's first process, by which it knows
        the others of its role. lacks: why this would not run as it is, each reason a sentence; empty for a plan that
        can. left_out: what was given for a sweep and this point of it has no use for, each with the reason. buckets: of
        gradients, which workers exchange; None: there are none, or only the training tells. predict: of mode=predict,
        what it looks at. launcher: the class that starts the processes; empty: the usual one. concern: a warning about
        settings that run but are probably a mistake; usually empty. stream: how the training data are read, where they
        are a stream; else empty. restarts: how often within an hour the processes are started again when one of them
        dies. insecure: servers take any program that reaches the launcher's store for a process of the run. by_role:
        each process is started by a command of its own, and is a host for itself. least_nnodes: hosts may come and go,
        while so many are there; 0: all stay to the end. whole_path: the user named the run's folder by a path from the
        root: so are its copies at ``checkpoint.to``. transport: how workers and parameter servers reach each other;
        empty: there are no servers. denominator: what the loss of a batch is divided by, so that it is a mean over
        batches, too; loss: the same in words, or empty. class_weights: those that are ``balanced`` in the config, by
        key of ``loss``. started_in: the working folder, from which the config's relative paths lead. taken: which part
        of the file of weights is taken; empty: all of it, or there is none. own_code: folders of the module search path
        that hold the user's own classes. labels: for each label of the data, the output of the weights that has its
        name; empty: the one of its number.
    """

    name: str
    mode: str
    weights: str
    strategy: str
    strategy_worker: str
    traits: Traits
    leased: bool
    entries: dict[str, str]
    roles: dict[str, int]
    nnodes: int
    node_rank: int
    processes: list[Process]
    device: str
    endpoint: str
    batch_size: int
    merge: int
    global_batch_size: int
    val_batch_size: int
    epochs: int
    steps_per_epoch: int
    total_steps: int
    lr: float | None
    lr_factor: float
    update_batch: int
    best: str
    parameters: int
    facts: Facts
    preprocessing: dict[str, Any]
    chosen: Chosen
    why: dict[str, str]
    run_dir: str
    tracking: str
    environment: dict[str, dict[str, str]]
    lacks: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    concern: str = ""
    insecure: bool = False
    lower: dict[str, bool] = field(default_factory=dict)
    buckets: Buckets | None = None
    predict: Predicted | None = None
    launcher: str = ""
    restarts: int = 0
    stream: str = ""
    by_role: bool = False
    least_nnodes: int = 0
    lease_batches: int = 0
    drops_lost: bool = False
    transport: str = ""
    labels: list[int] = field(default_factory=list)
    tests: bool = False
    limit_val: int = 0
    whole_path: bool = False
    started_in: str = ""
    taken: str = ""
    own_code: list[str] = field(default_factory=list)
    denominator: str = "samples"
    class_weights: dict[str, list[float]] = field(default_factory=dict)
    loss: str = ""

    @property
    def own_folder(self) -> Path:
        """The folder where this host's launcher writes; the run's folder, which hosts may share, is host 0's."""
        run_dir = Path(self.run_dir)
        return run_dir / f"host.{self.node_rank}" if self.node_rank else run_dir

    @property
    def here(self) -> list[Process]:
        """The processes of this host."""
        return [process for process in self.processes if process.node == self.node_rank]

    @property
    def whose(self) -> str:
        """Whose updates this host's result counts, where each worker takes its own, as many as it gets work for: `` of
        worker N``."""
        first = min((process.rank for process in self.here if process.role == "worker"), default=0)
        return f" of worker {first}" if self.leased else ""

    @property
    def workers(self) -> int:
        """The number of workers over all hosts."""
        return self.roles["worker"]

    def nodes_of(self, role: str) -> list[int]:
        """The host number of each process of a role, by the process's rank."""
        return [process.node for process in self.processes if process.role == role]

    def as_dict(self) -> dict[str, Any]:
        """Return this plan as plain data, as in plan.json."""
        plain = asdict(self)
        return {**plain, **plain.pop("traits"), **{name: plain[name] or {} for name in ("predict", "buckets")}}

    @staticmethod
    def of(plain: Mapping[str, Any]) -> Plan:
        """Make a plan of what :meth:`as_dict` returned, after JSON."""
        traits = {trait.name for trait in fields(Traits)}
        made = {
            "traits": Traits(**{name: plain[name] for name in traits}),
            "facts": Facts.of(plain["facts"]),
            "chosen": Chosen(**plain["chosen"]),
            "processes": [Process(**process) for process in plain["processes"]],
            **{name: kind(**plain[name]) if plain[name] else None for name, kind in MAYBE.items()},
        }
        return Plan(**{name: value for name, value in plain.items() if name not in traits} | made)


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
        stream=how(config, facts),
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
