"""Checks that the data can do what the config asks for."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from trainer.config import keys, schema
from trainer.config.run_config import RunConfig
from trainer.data.source import Facts
from trainer.errors import UserError
from trainer.metrics import best
from trainer.planning.checked import Checked
from trainer.planning.user_class_checks import refusals
from trainer.wording import counted


def with_classes(config: RunConfig, facts: Facts) -> RunConfig:
    """Return the config with the data's number of classes, unless the config sets one."""
    found = {"num_classes": facts.classes}
    if config.data.num_classes is None:
        config = config.changed(data=found)
    return config.changed(model=found) if config.model.get("num_classes", 0) is None else config


def check_orders(checked: Checked) -> None:
    """Refuse an order of samples, or mixing of batches, that is impossible with these data."""
    check_order(checked.config, checked.facts)
    check_mixing(checked.config)


def check_data(checked: Checked) -> None:
    """Refuse a config with another number of classes than the data, or that asks for what is impossible with them."""
    config, facts = checked.config, checked.facts
    if config.data.num_classes != facts.classes:
        raise UserError(f"data.num_classes={config.data.num_classes}", f"{facts.source} has {counted(facts.classes, 'class')}", f"data.num_classes={facts.classes}")  # fmt: skip
    inputs = facts.shape if isinstance(facts.shape, dict) else ()
    what, declaration = f"strategy._target_={config.strategy._target_}", checked.declaration
    for refusal in refusals(what, "refuse_inputs", lambda: declaration.refuse_inputs(inputs, facts.source)):
        raise refusal
    if facts.streams and not checked.declaration.traits.leases:
        raise UserError("data.cache=false", f"strategy={checked.declaration.name} reads samples by number, from the cache", "data.cache=true")  # fmt: skip
    ids, rows = config.node("data").get("hash_size", 0), config.model.get("table_size")
    if rows is not None and (ids is None or ids > rows):
        raise UserError(f"model.table_size={rows}", f"the ids of {facts.source} go up to {ids or '2^63'} (data.hash_size)", f"model.table_size={keys.spelled(ids)}")  # fmt: skip


def check_enough(checked: Checked) -> None:
    """Refuse more workers than there are training samples."""
    config, facts, workers = checked.config, checked.facts, checked.workers
    if config.mode == "train" and facts.train_samples < workers:
        raise UserError(f"{workers} workers", f"{facts.source} has {facts.train_samples} training samples, fewer than workers", fewer(checked))  # fmt: skip


def fewer(checked: Checked) -> str:
    """What to type if there are fewer training samples than workers: a smaller ``launch.nproc``."""
    config, samples = checked.config, max(1, checked.facts.train_samples)
    if config.sampler.drop_last and config.data.global_batch_size is None:
        samples = max(1, samples // config.batch_size)
    nodes, nproc = config.launch.nnodes, samples // config.launch.nnodes
    if not nproc:
        nodes, nproc = max(1, samples // checked.nproc), min(checked.nproc, samples)
    each = f"launch.nproc={nproc}" if config.launch.workers is None else f"launch.workers={nodes * nproc}"
    return (f"launch.nnodes={nodes} " if nodes != config.launch.nnodes else "") + each


def check_order(config: RunConfig, facts: Facts) -> None:
    """Refuse a sampler that repeats samples without shuffling, or without knowing which samples there are."""
    order = config.sampler.order
    if order == "each_once":
        return
    if not config.sampler.shuffle:
        raise UserError("sampler.shuffle=false", f"sampler.order={order} draws the samples at random", "sampler.shuffle=true")  # fmt: skip
    if facts.streams or facts.kind == "random":
        raise UserError(f"sampler.order={order}", f"{facts.source} have no samples to choose from by their class or number", "sampler.order=each_once")  # fmt: skip


def check_mixing(config: RunConfig) -> None:
    """Refuse mixup and CutMix for a loss that does not take shares of classes."""
    data, loss = config.node("data"), config.loss
    takes_none = {
        schema.BinaryCrossEntropyLoss._target_: "loss=binary_cross_entropy",
        schema.SquaredErrorLoss._target_: "loss.target=class_number" if loss.get("target") == "class_number" else "",
    }.get(str(loss["_target_"]))
    for key in ("mixup", "cutmix"):
        if data.get(key) and takes_none:
            raise UserError(f"data.{key}={data[key]}", f"makes labels that are shares of classes, which {takes_none} does not take", "loss=cross_entropy")  # fmt: skip


def check_optimization(checked: Checked) -> None:
    """Refuse schedules and early stops whose validation metric does not exist, and impossible clipping."""
    config = checked.config
    strategy, node = config.strategy, config.optimizer
    if strategy.clip_norm is not None and strategy.clip_value is not None:
        raise UserError(f"strategy.clip_value={strategy.clip_value}", f"the gradient is clipped by strategy.clip_norm={strategy.clip_norm} already, and their order would matter", "strategy.clip_norm=null")  # fmt: skip
    if node.get("lr_scaling", "none") != "none" and node.get("lr") is None:
        raise UserError(f"optimizer.lr_scaling={node['lr_scaling']}", "this optimizer has no lr to scale", "optimizer.lr_scaling=none")  # fmt: skip
    for pattern, factor in (node.get("lr_factors") or {}).items():
        if not isinstance(factor, (int, float)) or isinstance(factor, bool) or not 0 <= factor < math.inf:
            raise UserError(f"optimizer.lr_factors={{{pattern}: {keys.spelled(factor)}}}", "a factor is a number, at least 0 (which freezes)", f"optimizer.lr_factors={{{pattern}: 1}}")  # fmt: skip
    check_metric_names(config, checked.facts)
    averaged, known = config.ema.decay is not None, best.names(checked.facts, True, config.metrics)
    for path, metric, default in watching(config):
        if metric in known and not averaged and metric.startswith(best.AVERAGED):
            raise UserError(f"{path}={metric}", "no average of the weights is kept (ema.decay=null)", f"{path}={metric} ema.decay=0.999")  # fmt: skip
        if metric not in known:
            near = best.meant(metric, known) or keys.nearest(metric if "/" in metric else best.RAW + metric, known) or default  # fmt: skip
            there = ", ".join(best.names(checked.facts, averaged, config.metrics))
            raise UserError(f"{path}={metric}", f"a validation here measures {there}", f"{path}={near}")
        if path != "best.metric" and not config.execution.val_every and not config.execution.val_every_steps:
            raise UserError(f"{path}={metric}", "it goes by validations, and execution.val_every=0 has one alone, at the end", "execution.val_every=1")  # fmt: skip


def check_validation(config: RunConfig, typed: set[str]) -> None:
    """Refuse ``validation=false`` with settings that need validations, or with typed keys that would have no effect."""
    if config.validation:
        return
    none = "with validation=false nothing is validated"
    if config.mode == "eval":
        raise UserError("validation=false", "mode=eval does nothing but validate", "validation=true")
    for path, metric, _ in watching(config):
        instead = "scheduler=cosine" if path == "scheduler.metric" else f"{path}=null"
        raise UserError(f"{path}={metric}", f"it goes by validations, and {none}", f"{instead} (or validation=true)")
    if best_kept := config.checkpoint.keep_best:
        raise UserError(f"checkpoint.keep_best={best_kept}", f"{none}, so no checkpoint is the best", "checkpoint.keep_best=0 (or validation=true)")  # fmt: skip
    for name in config.metrics:
        raise UserError(f"metrics.{name}", f"is measured in validations, and {none}", f"~metrics.{name} (or validation=true)")  # fmt: skip
    told = config.execution
    idle = [
        ("limit_val_batches", config.limit_val_batches, None), ("execution.val_every", told.val_every, 1),
        ("execution.val_every_steps", told.val_every_steps, None), ("data.val_batch_size", config.data.val_batch_size, None),
    ]  # fmt: skip
    for key, value, usual in idle:
        if key in typed and value != usual:
            raise UserError(f"{key}={value}", none, f"{key}={'null' if usual is None else usual} (or validation=true)")


def check_metric_names(config: RunConfig, facts: Facts) -> None:
    """Refuse user's metrics whose names clash with the data's own metrics, or that MLflow does not accept."""
    for name in config.metrics:
        if not re.fullmatch(r"[A-Za-z][\w-]*", str(name)):
            raise UserError(f"metrics.{name}", "a name is a letter, then letters, digits, _ and -", f"metrics.{re.sub(r'[^A-Za-z0-9_-]', '_', f'm{name}')}={{...}}")  # fmt: skip
        if name in best.measured(facts):
            raise UserError(f"metrics.{name}", "is measured anyway, as val/" + name, f"metrics.my_{name}={{...}}")


def watching(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield each key that names a validation metric (such as ``best.metric``), that metric, and a default."""
    plateau = config.node("scheduler").get("metric") if best.is_plateau(config.scheduler._target_) else None
    for name, metric in (
        ("best", config.best.metric),
        ("early_stop", config.early_stop.metric),
        ("scheduler", plateau),
    ):
        if metric is not None:
            yield f"{name}.metric", str(metric), "val/loss"
