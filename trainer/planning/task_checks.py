"""Finds the task of a run from the kind of the data's labels, with its loss and its number of outputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.config import schema
from trainer.config.keys import is_of
from trainer.config.run_config import RunConfig
from trainer.data.source import Facts
from trainer.errors import UserError
from trainer.host import json_text
from trainer.planning.checked_config import Lacks
from trainer.planning.class_names import run_of
from trainer.planning.user_class_checks import asked, refusals
from trainer.tasks.contract import AUTO, KINDS, Task, task_of

SHIPPED = {
    "classification": schema.ClassificationTask,
    "binary": schema.BinaryTask,
    "multi_label": schema.MultiLabelTask,
    "regression": schema.RegressionTask,
}
"""The trainer's own task for each kind of labels."""


def with_task(config: RunConfig, facts: Facts, typed: Collection[str], lacks: Lacks) -> tuple[RunConfig, str]:
    """Return the config with its task in place of ``auto``, the task's loss and number of outputs; and why this task.

    The loss stays where the user has typed one, or a recipe has another one than the default.

    Raises:
        UserError: the task does not learn the labels of these data.
    """
    if facts.task not in KINDS:
        why = f"its facts say task={facts.task!r}, and labels are {', '.join(KINDS)}"
        raise UserError(f"data._target_={config.data._target_}", why, "Facts(task=...) of one of these")
    why_task = "from the data" if config.task._target_ == AUTO else ""
    if why_task:
        config = config.replaced("task", asdict(SHIPPED[facts.task]()))
    task = task_of(config)
    if task.labels != facts.task:
        why = f"learns {KINDS.get(task.labels, task.labels)}, and {facts.source} has {KINDS[facts.task]}"
        raise UserError(f"task={task.name}", why, "task=auto")
    _check_weights(config, task)
    untouched = dict(config.loss) == asdict(schema.CrossEntropyLoss()) and not any(is_of(k, ["loss"]) for k in typed)
    if untouched:
        config = config.replaced("loss", asked(f"task={task.name}", "loss", task.loss))
    outputs = asked(f"task={task.name}", "outputs", lambda: task.outputs(facts))
    if outputs != facts.classes and config.model.get("num_classes") == config.data.num_classes:
        config = config.changed(model={"num_classes": outputs})
    for refusal in refusals(f"task={task.name}", "refuse", lambda: task.refuse(config, facts)):
        with lacks:
            raise refusal
    return config, why_task


def _check_weights(config: RunConfig, task: Task) -> None:
    """Refuse weights of a run with another task, in mode=eval and mode=predict."""
    run = None if config.mode == "train" else run_of(Path(str(config.weights)))
    try:
        theirs = None if run is None else json_text.read(run / "plan.json").get("objective", {}).get("task")
    except (OSError, ValueError, AttributeError, RecursionError):
        return
    if theirs and theirs != task.name:
        why = f"{run} was trained with task={theirs}, and this is task={task.name}"
        raise UserError(f"weights={config.weights}", why, f"weights=RUN of task={task.name}")


def check_checkpoint(config: RunConfig, before: Mapping[str, Any], folder: Path) -> None:
    """Refuse a checkpoint of another task, whose metrics and head are others.

    Args:
        before: the checkpoint's config.

    Raises:
        UserError: it is of another task.
    """
    target = before.get("task", {}).get("_target_")
    if target not in (None, AUTO, config.task._target_):
        name = next((name for name, kind in SHIPPED.items() if kind._target_ == target), target)
        instead = "the data and task of before, or model=finetune model.weights=FILE for a new head"
        raise UserError(f"task={task_of(config).name}", f"{folder} is of task={name}", instead)


def said_of_loss(config: RunConfig) -> str:
    """The plan's remark on a loss that the task has chosen in place of cross-entropy; else empty."""
    task = task_of(config)
    usual = asdict(schema.CrossEntropyLoss())["_target_"]
    node = dict(config.loss)
    return f"{node['_target_']} (of task={task.name})" if node == task.loss() and node["_target_"] != usual else ""
