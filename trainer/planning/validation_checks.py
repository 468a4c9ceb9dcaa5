"""Checks which settings need validations, and whether the validation metrics that they name exist."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator

from trainer.config import keys
from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.metrics import best
from trainer.optim.schedules import is_plateau
from trainer.planning.checked_config import Checked
from trainer.tasks.contract import task_of


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
    measured = task_of(config).measured(checked.facts)
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
            near = (
                best.meant(metric, known)
                or keys.nearest(metric if "/" in metric else best.RAW + metric, known)
                or default
            )
            there = ", ".join(best.names(measured, averaged, config.metrics))
            raise UserError(f"{path}={metric}", f"a validation here measures {there}", f"{path}={near}")
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
    told = config.execution
    idle = [
        ("limit_val_batches", config.limit_val_batches, None),
        ("execution.val_every", told.val_every, 1),
        ("execution.val_every_steps", told.val_every_steps, None),
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
