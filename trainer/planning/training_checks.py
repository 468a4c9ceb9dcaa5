"""Checks the loss, the optimizer and the validations: class weights, clipping, and metrics that are watched."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from typing import Any

from trainer.config import keys, schema
from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.metrics import best
from trainer.optim.schedules import is_plateau
from trainer.planning.auto import ModelFacts
from trainer.planning.checked_config import Checked
from trainer.planning.task_checks import said_of_loss
from trainer.planning.user_class_checks import asked
from trainer.tasks.contract import task_of
from trainer.wording import counted


def check_optimization(checked: Checked) -> None:
    """Refuse schedules, early stops and a best model whose validation metric does not exist, and impossible
    clipping."""
    config = checked.config
    strategy, node = config.strategy, config.optimizer
    if strategy.clip_norm is not None and strategy.clip_value is not None:
        raise UserError(
            f"strategy.clip_value={strategy.clip_value}",
            f"the gradient is clipped by strategy.clip_norm={strategy.clip_norm} already, and their order would matter",
            "strategy.clip_norm=null",
        )
    if node.get("lr_scaling", "none") != "none" and node.get("lr") is None:
        raise UserError(
            f"optimizer.lr_scaling={node['lr_scaling']}",
            "this optimizer has no lr to scale",
            "optimizer.lr_scaling=none",
        )
    for pattern, factor in (node.get("lr_factors") or {}).items():
        if not isinstance(factor, (int, float)) or isinstance(factor, bool) or not 0 <= factor < math.inf:
            raise UserError(
                f"optimizer.lr_factors={{{pattern}: {keys.spelled(factor)}}}",
                "a factor is a number, at least 0 (which freezes)",
                f"'optimizer.lr_factors={{{pattern}: 1}}'",
            )
    task = task_of(config)
    measured = asked(f"task={task.name}", "metrics", lambda: task.measured(checked.facts))
    _check_metric_names(config, measured)
    averaged, known = config.ema.decay is not None, best.names(measured, True, config.metrics)
    for path, metric, default in _watched(config):
        if metric in known and not averaged and metric.startswith(best.AVERAGED):
            raise UserError(
                f"{path}={metric}",
                "no average of the weights is kept (ema.decay=null)",
                f"{path}={metric} ema.decay=0.999",
            )
        if metric not in known:
            near = best.meant(metric, [*measured, *config.metrics]) or default
            with_average = " ema.decay=0.999" if near.startswith(best.AVERAGED) and not averaged else ""
            there = ", ".join(best.names(measured, averaged, config.metrics))
            raise UserError(f"{path}={metric}", f"a validation here measures {there}", f"{path}={near}{with_average}")
        if path != "best.metric" and not config.execution.val_every and not config.execution.val_every_steps:
            raise UserError(
                f"{path}={metric}",
                "it goes by validations, and execution.val_every=0 has one alone, at the end",
                "execution.val_every=1",
            )


def check_validation(config: RunConfig, typed: set[str]) -> None:
    """Refuse ``validation=false`` with settings that need validations, or with typed keys that would have no effect."""
    if config.validation:
        return
    none = "with validation=false nothing is validated"
    if config.mode == "eval":
        raise UserError("validation=false", "mode=eval does nothing but validate", "validation=true")
    for path, metric, _ in _watched(config):
        instead = "scheduler=cosine" if path == "scheduler.metric" else f"{path}=null"
        raise UserError(f"{path}={metric}", f"it goes by validations, and {none}", f"{instead} (or validation=true)")
    if best_kept := config.checkpoint.keep_best:
        raise UserError(
            f"checkpoint.keep_best={best_kept}",
            f"{none}, so no checkpoint is the best",
            "checkpoint.keep_best=0 (or validation=true)",
        )
    for name in config.metrics:
        raise UserError(
            f"metrics.{name}", f"is measured in validations, and {none}", f"~metrics.{name} (or validation=true)"
        )
    execution = config.execution
    idle = [
        ("limit_val_batches", config.limit_val_batches, None),
        ("execution.val_every", execution.val_every, 1),
        ("execution.val_every_steps", execution.val_every_steps, None),
        ("data.val_batch_size", config.data.val_batch_size, None),
    ]
    for key, value, usual in idle:
        if key in typed and value != usual:
            raise UserError(f"{key}={value}", none, f"{key}={'null' if usual is None else usual} (or validation=true)")


def _check_metric_names(config: RunConfig, measured: Collection[str]) -> None:
    """Refuse user's metrics whose names clash with the task's metrics, or that MLflow does not accept."""
    for name in config.metrics:
        if not re.fullmatch(r"[A-Za-z][\w-]*", str(name)):
            raise UserError(
                f"metrics.{name}",
                "a name is a letter, then letters, digits, _ and -",
                f"metrics.{re.sub(r'[^A-Za-z0-9_-]', '_', f'm{name}')}={{...}}",
            )
        if name in measured:
            raise UserError(f"metrics.{name}", "is measured anyway, as val/" + name, f"metrics.my_{name}={{...}}")


def _watched(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield each key that names a validation metric (such as ``best.metric``), that metric, and a default."""
    plateau = config.node("scheduler").get("metric") if is_plateau(config.scheduler._target_) else None
    for name, metric in (
        ("best", config.best.metric),
        ("early_stop", config.early_stop.metric),
        ("scheduler", plateau),
    ):
        if metric is not None:
            yield f"{name}.metric", str(metric), "val/loss"


BALANCED = "balanced"


def check_weights(checked: Checked) -> None:
    """Refuse weights of classes that are no weights, or that cannot be computed from these data.

    Raises:
        UserError: they cannot be used.
    """
    loss, facts = checked.config.loss, checked.facts
    target = str(loss.get("_target_"))
    if target == schema.BinaryCrossEntropyLoss._target_ and loss.get("weight") is not None:
        raise UserError(
            f"loss.weight={keys.spelled(loss.get('weight'))}",
            f"{target} takes it as a factor for each sample of a batch, not for each class",
            "loss.weight=null loss.pos_weight=NUMBER",
        )
    for name in ("weight", "pos_weight"):
        value = loss.get(name)
        if value is None:
            continue
        if value == BALANCED:
            if facts.streams or facts.iterable or facts.kind == "random":
                example = "2.0" if name == "pos_weight" else _list([1.0] * facts.classes)
                raise UserError(
                    f"loss.{name}={value}",
                    f"{facts.source} have no labels that can be counted before the training",
                    f"loss.{name}={example} with your own numbers",
                )
        elif target.startswith("torch."):
            _check_numbers(name, value, checked)


def _check_numbers(name: str, value: Any, checked: Checked) -> None:
    """Refuse anything but a weight for each class; for ``pos_weight``, one number."""
    facts, config = checked.facts, checked.config
    what, ones = f"loss.{name}={keys.spelled(value)}", "1.0" if name == "pos_weight" else _list([1.0] * facts.classes)
    numbers = value if isinstance(value, (list, tuple)) else [value] if name == "pos_weight" else None
    if isinstance(value, dict) and isinstance(value.get("data"), (list, tuple)):
        raise UserError(
            what, "numbers are enough: they become a tensor on the device", f"loss.{name}={_list(value.get('data'))}"
        )
    if numbers is None or not all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in numbers):
        wanted = (
            "a number" if name == "pos_weight" else "a list with a number for each class, in the order of the classes"
        )
        raise UserError(
            what,
            f"must be {wanted}, or {BALANCED}",
            f"loss.{name}={BALANCED} (or loss.{name}={ones} with your own numbers)",
        )
    wrong = next((n for n in numbers if not math.isfinite(n) or n < 0), None)
    if wrong is not None:
        raise UserError(
            what, f"holds {keys.spelled(wrong)}, and a weight is a finite number, at least 0", f"loss.{name}={ones}"
        )
    if not any(numbers):
        raise UserError(what, "all weights are 0, so that nothing would be learnt", f"loss.{name}={ones}")
    if name == "pos_weight":
        factors = facts.classes if facts.task == "multi_label" else 1
        if len(numbers) not in (1, factors):
            why = "the model has one output, so there is one factor"
            why = why if factors == 1 else f"has {len(numbers)} factors for {facts.targets}"
            raise UserError(what, why, f"loss.pos_weight={numbers[0]}")
        return
    if not all(numbers) and (share := config.loss.get("label_smoothing")):
        why = "a sample of a class with weight 0 would count in the smoothing and not in the mean"
        raise UserError(f"loss.label_smoothing={share}", f"{why} ({what})", "loss.label_smoothing=0.0")
    outputs = config.model.get("num_classes")
    classes = outputs if isinstance(outputs, int) else facts.classes
    if len(numbers) != classes:
        raise UserError(
            what,
            f"has {counted(len(numbers), 'weight')} for {counted(classes, 'class')}",
            f"loss.weight={BALANCED} (or {_list([1.0] * classes)} with your own numbers)",
        )


def _list(numbers: Any) -> str:
    shown = [f"{n:g}" if isinstance(n, (int, float)) else str(n) for n in numbers]
    return "[" + ",".join([*shown[:16], *(["..."] if len(shown) > 16 else [])]) + "]"


def check_denominator(checked: Checked, model: ModelFacts) -> None:
    """Refuse a loss whose values on batches do not add up to the value on the global batch, if they must.

    Raises:
        UserError: it is a sum, or the update would be another than that of one process on the global batch.
    """
    config, found = checked.config, model.denominator
    what = f"loss ({config.loss.get('_target_')})"
    if config.mode == "predict":
        return
    if found == "sum":
        instead = "loss.reduction=mean" if "reduction" in config.loss else ""
        what = f"loss.reduction={config.loss.get('reduction')}" if instead else what
        why = "is the sum over a batch, so that updates would depend on how samples are spread over batches and workers"
        raise UserError(what, why if instead else f"{why}. Divide by the number of samples in it", instead)
    if found != "neither" or config.mode != "train":
        return
    changes = []
    if checked.merge > 1:
        changes += [
            (
                f"strategy.gradient_merge.k_steps=1 data.batch_size={config.batch_size * checked.merge} "
                f"data.global_batch_size=null"
            )
        ]
    traits = checked.declaration.traits
    if checked.workers > 1 and traits.lockstep and (traits.exact or not traits.replicas):
        changes += ["strategy=single launch.nproc=1"]
    if changes:
        raise UserError(
            what,
            (
                "is no mean over samples: its value on a batch does not follow from its values on parts of it, so "
                "that the parts' gradients do not make that of the global batch. Give the class a method "
                "denominator(labels) if it is a weighted mean"
            ),
            " ".join(changes),
        )


def balanced_keys(config: RunConfig) -> list[str]:
    """The keys of ``loss`` whose weights are computed from the training data."""
    return [name for name in ("weight", "pos_weight") if config.loss.get(name) == BALANCED]


MEANS = {
    "samples": "a mean over samples",
    "class weights": "a mean over the weights of the samples' classes",
    "its method denominator": "a mean by its method denominator",
    "neither": "no mean over samples",
    "random": "differs from call to call: taken for a mean over samples",
}
"""What the loss of a batch was found to be, for the plan."""


def loss_in_words(checked: Checked, denominator: str) -> str:
    """What the loss of a batch is, for the plan; empty for torch's mean over samples."""
    config, traits = checked.config, checked.declaration.traits
    usual = str(config.loss.get("_target_")).startswith(("torch.", "trainer."))
    if config.mode == "predict" or (usual and denominator == "samples" and not balanced_keys(config)):
        return said_of_loss(config) if config.mode == "train" else ""
    own_steps = not traits.exact and (traits.replicas or not traits.lockstep)
    of = ", of each worker's own batches" if config.mode == "train" and own_steps and checked.workers > 1 else ""
    return MEANS.get(denominator, denominator) + of


def concern_of(config: RunConfig, denominator: str) -> str:
    """A remark on an odd loss that runs; usually empty."""
    what = f"loss ({config.loss.get('_target_')})"
    if denominator == "neither":
        return (
            f"{what} is no mean over samples: each batch's own value is minimised, and val/loss is the mean of "
            f"its values on batches"
        )
    if denominator == "random":
        return (
            f"{what} differs from call to call, so it was not tested whether it is a mean over samples; it is "
            f"taken for one"
        )
    return ""
