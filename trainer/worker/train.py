"""One worker of the run: builds model, data and strategy from the finished config and hands them to the loop."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.config.instantiate import call_target, for_saved_weights, locate
from trainer.data.augment.mixing import Mixing
from trainer.data.feed import BlockReader, Feed, Placement
from trainer.data.growth import growing_readers
from trainer.data.sampler import (
    ClassBalanced,
    DistributedBatchSampler,
    EvaluationSampler,
    Order,
    RepeatedAugmentation,
    training_sampler,
)
from trainer.data.source import Facts, Splits
from trainer.data.work import MapWork, StreamWork
from trainer.errors import RunFailed
from trainer.metrics import validation_file
from trainer.metrics.best import EarlyStop, best_metric, is_plateau
from trainer.metrics.binary import Binary
from trainer.metrics.classification import Classification, Task
from trainer.metrics.own import OwnMetrics
from trainer.models.residual import zero_last_norms
from trainer.models.rows import materialise, tables
from trainer.models.strided_bf16 import write_all_gradients
from trainer.optim.averaged import averaged_weights
from trainer.optim.groups import Rate, freeze, grouped, optimizer_of, rates
from trainer.optim.schedules import Plateau
from trainer.optim.sparse import DenseAndSparse, rule_of, sparse_optimizer
from trainer.optim.updater import Updater
from trainer.run_folder.report import Report
from trainer.strategies.contract import Seat, Strategy
from trainer.worker import example
from trainer.worker.callbacks import made
from trainer.worker.compiling import own_code
from trainer.worker.host_monitor import watched
from trainer.worker.loop import Rhythm, Training, fit
from trainer.worker.profiler import Profiled

UNLIMITED = 1 << 62
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def train(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """Train as one worker.

    Args:
        seat: this process among the others.
        payload: ``config`` (resolved), ``plan`` (as a dict), ``run_dir``.

    Returns:
        Final and best metrics, updates, samples, seconds (equal on all workers in lockstep strategies).
    """
    run_dir = Path(payload["run_dir"])
    with at_work(seat, payload) as run:
        fit(run)
        if run.report.run_dir is not None:
            run.report.gauges(run.strategy.last_gauges())
        run.strategy.keep(run_dir / "checkpoints")
        while True:  # again when somebody was lost meanwhile, who may have been the first
            index, taking_part = run.strategy.members()
            if index == 0:
                keep_model(run, payload, run_dir)
            if not payload["plan"]["survives"]:
                break
            run.strategy.total(torch.zeros(1, dtype=torch.float64))
            if run.strategy.members()[1] == taking_part:
                break
        return {**run.report.outcome(), **(run.feed.growth.found() if run.feed.growth is not None else {})}


def keep_model(run: Training, payload: dict[str, Any], run_dir: Path) -> None:
    """The trained model, what the validations found, and what it takes to use it elsewhere."""
    with run.strategy.whole():
        save(run.model, run_dir / "model.safetensors")
        if run.ema is not None:
            with run.ema.in_place():
                save(run.model, run_dir / "model_ema.safetensors")
    keep_findings(run, run_dir)
    config, inputs = payload["config"], run.feed.validation_inputs([0])
    example.keep(
        run_dir,
        for_saved_weights(config["model"]),
        payload["plan"]["chosen"]["precision"],
        run.feed.place,
        inputs,
        call_target(config["data"], "data").row_reader(),
        payload["plan"]["preprocessing"],
    )


@contextlib.contextmanager
def at_work(seat: Seat, payload: dict[str, Any]) -> Iterator[Training]:
    """Everything built, and put away afterwards."""
    config, plan, run_dir = payload["config"], payload["plan"], Path(payload["run_dir"])
    take_seat(seat, config, plan)
    with settings(config, plan, seat), membership(seat, payload) as strategy:
        best = best_metric(config, plan["facts"]["task"])
        own = None if plan["lockstep"] else run_dir / f"status.{seat.rank}.json"
        report = Report(run_dir if seat.rank == 0 else None, plan["total_steps"], best, plan["lower"], own)
        try:
            report.doing("building the model and opening the data")
            run = build(config, plan, seat, strategy, report)
            run.run_dir = run_dir
            if config["profile"]:
                run.profile = profiled(config, plan, seat, run_dir)
            try:
                with host_watched(seat, report, config["tracking"]["system_every_s"]):
                    yield run
            finally:
                run.profile.close()
                run.feed.close()
        finally:
            report.close()


def host_watched(seat: Seat, report: Report, every_s: float | None) -> AbstractContextManager[None]:
    """The load of this host is measured, by the first of its workers."""
    if every_s is None or seat.local_rank:
        return nullcontext()
    node, nodes = seat.rank // seat.local_size, -(-seat.size // seat.local_size)
    return watched(node, nodes, seat.store, report, every_s)


@contextlib.contextmanager
def membership(seat: Seat, payload: dict[str, Any]) -> Iterator[Strategy]:
    """This worker's strategy, left in the end."""
    strategy: Strategy = locate(payload["plan"]["strategy_worker"])(_arguments(payload["config"]["strategy"]), seat)
    try:
        yield strategy
    finally:
        strategy.leave()


def take_seat(seat: Seat, config: dict[str, Any], plan: dict[str, Any]) -> None:
    """What a worker's place has to do with the run's size."""
    sampler = training_sampler(config, plan["facts"]["train_samples"], plan["batch_size"], seat.rank, seat.size)
    seat.even = sampler.even(plan["merge"], config["limit_train_batches"])
    seat.servers = plan["roles"].get("server", 0)


def build(config: dict[str, Any], plan: dict[str, Any], seat: Seat, strategy: Strategy, report: Report) -> Training:
    """Everything that the loop needs, from the config."""
    device, chosen = torch.device(seat.device), plan["chosen"]
    precision, channels_last = chosen["precision"], chosen["channels_last"]
    model = build_model(config, plan, device)
    if config["compile"]:
        model.compile()
    forward = strategy.place(model, Updaters(config, plan, precision))
    source = call_target(config["data"], "data")
    facts = Facts(**plan["facts"])
    splits = source.open(facts)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    order = make_order(config, facts, splits)
    _seed(config["seed"] + 1 + seat.rank)
    feed = Feed(
        splits,
        training_sampler(config, facts.train_samples, plan["batch_size"], seat.rank, seat.size, order),
        EvaluationSampler(facts.val_samples, plan["val_batch_size"], seat.rank, seat.size),
        Placement(splits, device, dtype, channels_last),
        merge=plan["merge"],
        average=config["strategy"]["gradient_merge"]["avg"],
        seed=config["seed"],
        num_workers=chosen["num_workers"],
        prefetch=chosen["prefetch"],
        pin_memory=chosen["pin_memory"],
        limit_train=config["limit_train_batches"],
        limit_val=config["limit_val_batches"],
        expect=strategy.expect if strategy.looks_ahead else None,
        mixing=make_mixing(config, facts),
        scatter=strategy.scatter if config["data"]["read"] == "scatter" else None,
        growth=growing_readers(config["data"], chosen, seat.local_size),
    )  # fmt: skip
    if plan["leased"]:
        feed.work = leased_work(config, plan, facts, splits, feed, strategy)
    execution = config["execution"]
    loss = call_target(config["loss"], "loss").to(device)

    def keep_best() -> None:
        with strategy.whole():
            save(model, Path(plan["run_dir"]) / "checkpoints" / "best.safetensors")

    return Training(
        model=model,
        forward=forward,
        task=make_task(facts, loss),
        strategy=strategy,
        feed=feed,
        report=report,
        rhythm=Rhythm(
            plan["epochs"], UNLIMITED if plan["leased"] else plan["total_steps"], execution["log_every"], execution["val_every"],
            execution["val_every_steps"],
        ),
        arithmetic=arithmetic(precision, device),
        lockstep=plan["lockstep"],
        keep_best=keep_best,
        ema=averaged_weights(model, config["ema"]),
        mean=not plan["same_everywhere"],
        early_stop=early_stop(config["early_stop"], plan["lower"]),
        callbacks=made(config["callbacks"], seat.rank, seat.size, Path(plan["run_dir"]), plan["total_steps"], model),
        own=OwnMetrics(config["metrics"], device),
        plateau=is_plateau(config["scheduler"]),
        compiling=", compiling the model" if config["compile"] else "",
    )  # fmt: skip


def profiled(config: dict[str, Any], plan: dict[str, Any], seat: Seat, run_dir: Path) -> Profiled:
    """A profiler of this worker's own updates."""
    execution, cuda = config["execution"], seat.device.startswith("cuda")
    after, updates = execution["profile_after"], execution["profile_steps"]
    return Profiled(seat.rank, run_dir, after, updates, plan["total_steps"], cuda)


def early_stop(node: dict[str, Any], lower: dict[str, bool]) -> EarlyStop | None:
    """From the ``early_stop`` node; None where it watches nothing."""
    return EarlyStop(node["metric"], node["patience"], node["min_delta"], lower) if node["metric"] else None


def leased_work(
    config: dict[str, Any], plan: dict[str, Any], facts: Facts, splits: Splits, feed: Feed, strategy: Strategy
) -> MapWork | StreamWork:
    """The training data in blocks that the strategy hands out."""
    sampler = config["sampler"]
    if facts.streams:
        return StreamWork(splits.train, plan["batch_size"], config["seed"], sampler["shuffle"], strategy.leases)
    feed.block_reader = BlockReader(
        splits.train,
        config["seed"],
        plan["chosen"]["num_workers"],
        plan["chosen"]["pin_memory"],
        make_mixing(config, facts),
        plan["chosen"]["prefetch"],
    )
    everything = DistributedBatchSampler(
        facts.train_samples, plan["batch_size"], 0, 1, config["seed"], sampler["shuffle"], sampler["drop_last"], False,
        make_order(config, facts, splits),
    )  # fmt: skip
    workers, limit = plan["roles"]["worker"], config["limit_train_batches"]
    size = config["data"]["lease_batches"] or max(1, min(64, len(everything) // (8 * workers)))
    updates = config["max_steps"] * workers if config["max_steps"] else None
    return MapWork(
        feed.block_reader,
        everything,
        size,
        limit and limit * workers,
        plan["merge"],
        updates,
        strategy.leases,
    )


def make_order(config: dict[str, Any], facts: Facts, splits: Splits) -> Order | None:
    """The epoch's order of samples, where it is not each once.

    Raises:
        RunFailed: classes are to be balanced, and the data do not tell theirs.
    """
    sampler, seed = config["sampler"], config["seed"]
    if sampler["order"] == "repeated_augmentation":
        return RepeatedAugmentation(facts.train_samples, sampler["repeats"], seed)
    if sampler["order"] != "class_balanced":
        return None
    labels = getattr(splits.train, "labels", None)
    if labels is None:
        raise RunFailed("sampler.order=class_balanced: the training set has no attribute 'labels' (N,)")
    return ClassBalanced(np.asarray(labels), seed)


def make_mixing(config: dict[str, Any], facts: Facts) -> Mixing | None:
    """Mixup and CutMix of training batches, where they are asked for."""
    data = config["data"]
    mixing = Mixing(data.get("mixup", 0.0), data.get("cutmix", 0.0), data.get("mix_probability", 1.0), facts.classes)
    return mixing if mixing.active else None


def keep_findings(run: Training, run_dir: Path) -> None:
    """What the last validation found, and the best where that is another; the images of their mistakes are read again."""
    best, last = run.examined.get("best"), run.examined.get("last")
    for which, sums in (("last", last), ("best", None if best is last else best)):
        found = None if sums is None else run.task.examined(sums)
        if found is not None:
            numbers = [mistake.number for mistake in found.mistakes]
            validation_file.keep(run_dir, which, found, run.feed.validation_inputs(numbers) if numbers else None)


def make_task(facts: Facts, loss: nn.Module) -> Task:
    """How the data's labels are learnt and measured."""
    if facts.task == "binary":
        return Binary(loss, facts.ceiling.get("auc"))
    return Classification(loss, facts.classes)


def build_model(config: dict[str, Any], plan: dict[str, Any], device: torch.device) -> nn.Module:
    """The model on the device, drawn from the seed, in the planned precision and memory format."""
    _seed(config["seed"])
    model: nn.Module = call_target(config["model"], "model")
    if config["model"].get("zero_init_residual"):
        zero_last_norms(model)
    if config["strategy"].get("sync_batch_norm"):
        from trainer.models.sync_batch_norm import synchronised

        model = synchronised(model, str(device))
    model = model.to(device, torch.float64 if plan["chosen"]["precision"] == "fp64" else None)
    if not plan.get("tables_at_servers"):
        materialise(model, config["seed"], device)
    freeze(model, config["optimizer"], [table for _, table in tables(model)])
    if plan["chosen"]["precision"] == "bf16" and device.type == "cpu":
        write_all_gradients(model)
    return model.to(memory_format=torch.channels_last) if plan["chosen"]["channels_last"] else model


class Updaters:
    """Makes the optimizers of a run."""

    def __init__(self, config: dict[str, Any], plan: dict[str, Any], precision: str) -> None:
        self.config, self.plan, self.precision = config, plan, precision

    def __call__(self, module: nn.Module) -> Updater:
        return make_updater(self.config, self.plan, module, self.precision)

    def rates(self, module: nn.Module) -> dict[str, Rate]:
        """How each parameter learns."""
        return rates(module, self.config["optimizer"])


def make_updater(config: dict[str, Any], plan: dict[str, Any], module: nn.Module, precision: str) -> Updater:
    """The optimizer, with its counterpart for sparse tables, its schedule, clipping and loss scale."""
    found = rates(module, config["optimizer"])
    sparse = {id(table.weight): (table.weight, found[f"{name}.weight"].lr) for name, table in tables(module)}
    trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad and id(p) not in sparse]
    optimizer = optimizer_of(config["optimizer"], grouped(trained, found), plan["lr"])
    if sparse:
        rule, numbers = rule_of(config["optimizer"], optimizer)
        weights, factors = zip(*sparse.values(), strict=True)
        optimizer = DenseAndSparse(optimizer, sparse_optimizer(rule, numbers, weights, factors))
    schedule = call_target(
        config["scheduler"], "scheduler", total_steps=plan["total_steps"], steps_per_epoch=plan["steps_per_epoch"]
    )
    if isinstance(schedule, Plateau):
        schedule.best.lower = plan["lower"]
    return Updater(
        optimizer,
        schedule.factor,
        config["strategy"]["clip_norm"],
        loss_scaling=precision == "fp16",
        clip_value=config["strategy"]["clip_value"],
        plateau=schedule if isinstance(schedule, Plateau) else None,
        lr=plan["lr"],
    )


def arithmetic(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """The context of a forward pass."""
    if precision not in DTYPES:
        return nullcontext
    return lambda: torch.autocast(device.type, DTYPES[precision])


@contextlib.contextmanager
def settings(config: dict[str, Any], plan: dict[str, Any], seat: Seat) -> Iterator[None]:
    """Process-wide settings of a run, put back afterwards, because one process may run several (a sweep, a notebook)."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    benchmark = torch.backends.cudnn.benchmark
    if plan["chosen"]["keep_memory"]:
        keep_freed_memory()
    torch.set_num_threads(plan["chosen"]["threads"])
    if seat.device.startswith("cuda"):
        torch.cuda.set_device(torch.device(seat.device))
        torch.backends.cudnn.benchmark = not config["execution"]["deterministic"]
    if config["execution"]["deterministic"]:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        with own_code() if config["compile"] else nullcontext():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.benchmark = benchmark


def keep_freed_memory() -> None:
    """Tell glibc to keep freed blocks: giving them back to the kernel each step costs 8-12% of a CPU step."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        m_trim_threshold, m_mmap_max = -1, -4
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)
    except (OSError, AttributeError):
        pass


def save(model: nn.Module, path: Path) -> None:
    """Parameters and buffers as safetensors, replaced atomically."""
    from safetensors.torch import save_model

    part = path.with_name(f".{path.name}")
    part.unlink(missing_ok=True)  # nothing is written through a link
    save_model(model, str(part), metadata={"format": "pt"})
    os.replace(part, path)


def _seed(seed: int) -> None:
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _arguments(node: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in node.items() if k != "_target_"}
