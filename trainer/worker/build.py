"""Everything that the loop needs, built from the finished config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.config.instantiate import call_target
from trainer.data.augment.mixing import Mixing
from trainer.data.feed import BlockReader, Feed
from trainer.data.growth import growing_readers
from trainer.data.placement import Placement
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
from trainer.metrics.best import EarlyStop, is_plateau
from trainer.metrics.binary import Binary
from trainer.metrics.classification import Classification, Task
from trainer.metrics.own import OwnMetrics
from trainer.optim.averaged import averaged_weights
from trainer.run_folder.report import Report
from trainer.strategies.contract import Seat, Strategy
from trainer.worker.callbacks import made
from trainer.worker.loop import Rhythm, Training
from trainer.worker.model import Updaters, arithmetic, build_model, save, seed_all

UNLIMITED = 1 << 62


def build(config: dict[str, Any], plan: dict[str, Any], seat: Seat, strategy: Strategy, report: Report) -> Training:
    """Everything that the loop needs, from the config."""
    device, chosen = torch.device(seat.device), plan["chosen"]
    precision, channels_last = chosen["precision"], chosen["channels_last"]
    model = build_model(config, plan, device)
    if config["compile"]:
        model.compile()
    forward = strategy.setup(model, Updaters(config, plan, precision))
    source = call_target(config["data"], "data")
    facts = Facts(**plan["facts"])
    splits = source.open(facts)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    order = make_order(config, facts, splits)
    seed_all(config["seed"] + 1 + seat.rank)
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


def make_task(facts: Facts, loss: nn.Module) -> Task:
    """How the data's labels are learnt and measured."""
    if facts.task == "binary":
        return Binary(loss, facts.ceiling.get("auc"))
    return Classification(loss, facts.classes)
