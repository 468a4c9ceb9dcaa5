"""The contract of a task: what labels are, which loss, which metrics, what ``predict`` writes, which pictures.

``Facts.task`` of a data source says what kind of labels it has, and ``task=`` what is learnt of them; ``task=auto`` is
the trainer's own task for that kind. A task is asked in three places:

- before the run, in the parent: ``refuse``, ``loss``, ``outputs`` and ``measured``, all without torch;
- in each worker: ``check_model`` (once, in the parent), ``objective``, ``scores``, and ``rows`` for ``predict``;
- at the end, in the parent: ``draw``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trainer.config.instantiate import call_target
from trainer.config.keys import spelled
from trainer.config.own_keys import OwnKeys
from trainer.config.run_config import RunConfig, typed
from trainer.config.schema import ClassBalancedSampler, CrossEntropyLoss, TaskConfig
from trainer.data.source import Facts
from trainer.errors import UserError
from trainer.metrics.best import RAW

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainer.metrics.contract import Objective
    from trainer.metrics.validation_file import Findings

CLASSIFICATION, BINARY, MULTI_LABEL, REGRESSION = "classification", "binary", "multi_label", "regression"
KINDS = {
    CLASSIFICATION: "a class for each sample",
    BINARY: "labels 0 and 1",
    MULTI_LABEL: "a set of labels for each sample",
    REGRESSION: "numbers",
}
"""What ``Facts.task`` can be, and what labels are then."""
AUTO = str(__name__ + ".auto")
"""``task=auto``: replaced by the trainer's own task for the data's labels."""
OF_CLASSES = (CLASSIFICATION, BINARY)
"""Kinds of labels that are one class for each sample."""


class Task(ABC):
    """Base class of tasks. Its module imports nothing heavy: torch is imported where it is used.

    A task whose metrics follow from sums over samples is a :class:`trainer.tasks.summed.Summed`.

    Args:
        config: the ``task`` node of the config, without ``_target_``.

    Attributes:
        labels: the kind of labels that it learns, a key of ``KINDS``.
        best: the metric of a validation that marks the best model where ``best.metric`` is null.
        lower: metrics of which less is better, besides those whose name ends in loss, mae or mse.
        curve: end of the names of the metrics that ``curves.png`` shows beside the loss, and the name of that panel.
        options: the keys that the schema knows; keys of one's own are in ``config``.
    """

    Options: ClassVar[type[TaskConfig]] = TaskConfig
    labels: ClassVar[str] = CLASSIFICATION
    best: ClassVar[str] = "loss"
    lower: ClassVar[tuple[str, ...]] = ()
    curve: ClassVar[tuple[str, str]] = ("", "")

    def __init__(self, **config: Any) -> None:
        self.config = OwnKeys("task", config)
        self.options = typed(self.Options, config)

    @property
    def name(self) -> str:
        """The task's name in messages and in the plan: the class's name in snake_case."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    @abstractmethod
    def metrics(self, facts: Facts) -> Sequence[str]:
        """Return the names of a validation's metrics, ``loss`` among them."""

    def measured(self, facts: Facts) -> list[str]:
        """Return the names of all that a validation measures; ``best.metric`` is one of them."""
        return [*self.metrics(facts), *(f"{name}_share" for name in facts.ceiling)]

    def loss(self) -> dict[str, Any]:
        """Return the config node of the loss where the user has not chosen one."""
        return asdict(CrossEntropyLoss())

    def typed_loss(self) -> str:
        """Return the loss of :meth:`loss` as a user types it."""
        return f"loss={_option(self.loss())}"

    def outputs(self, facts: Facts) -> int:
        """Return how many outputs the model needs for a sample."""
        return facts.classes

    def refuse(self, config: RunConfig, facts: Facts) -> list[UserError]:
        """Return every reason why this config cannot be run with this task and these data."""
        return [] if self.labels in OF_CLASSES else list(_without_classes(self, config))

    @abstractmethod
    def check_model(
        self, config: RunConfig, loss: nn.Module, outputs: torch.Tensor | None, facts: Facts
    ) -> tuple[str, str]:
        """Check before the run that the model's outputs and the loss suit the labels.

        Args:
            outputs: of two samples, perhaps on torch's meta device; None: the model runs on a GPU alone.

        Returns:
            what is odd about them, empty as a rule; what the loss of a batch is divided by
            (:func:`trainer.metrics.criterion.kind_of`).

        Raises:
            UserError: they do not suit.
        """

    @abstractmethod
    def objective(self, loss: nn.Module, facts: Facts, there: Sequence[int]) -> Objective:
        """Return what a worker trains and measures with.

        Args:
            there: of evaluated weights, the outputs that have a class of these data; empty: all.
        """

    @abstractmethod
    def trial(self, facts: Facts, shape: Sequence[int] | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores and the labels of a few samples, on which the user's own metrics are tried.

        Args:
            shape: of a sample's outputs; None: it is not known.
        """

    @abstractmethod
    def scores(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return what the user's own metrics (``metrics``) get as predictions, from the model's outputs."""

    @abstractmethod
    def header(self, names: Sequence[str], facts: Facts) -> list[str]:
        """Return the names of the columns that ``predict`` writes for a sample.

        Args:
            names: of the classes or numbers; empty: they have none.
        """

    @abstractmethod
    def width(self, facts: Facts) -> int:
        """Return how many numbers :meth:`rows` has for a sample."""

    @abstractmethod
    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return (N, W) float64 of the model's outputs: the numbers from which :meth:`cells` writes a sample."""

    @abstractmethod
    def cells(self, row: Sequence[float], names: Sequence[str]) -> list[str]:
        """Return a sample's texts in the table of predictions, as many as :meth:`header` has, from its row (W,)."""

    def pictures(self, folder: Path, which: str, found: Findings, names: Sequence[str], title: str) -> list[Path]:
        """Draw the findings of the ``last`` or the ``best`` validation into the run's folder; returns the files."""
        return []


def auto() -> None:
    """Stand in for ``task=auto``, which is replaced before it is called."""


def task_of(config: RunConfig) -> Task:
    """Return the config's task.

    Raises:
        UserError: it is no task, or does not take its keys.
    """
    made: Task = call_target(config.node("task"), "task", kind=Task)
    return made


def best_metric(config: RunConfig) -> str:
    """The name of the metric by which a run chooses its best model."""
    return str(config.best.metric or RAW + task_of(config).best)


def _without_classes(task: Task, config: RunConfig) -> list[UserError]:
    """Refusals of keys that need one class for each sample, where the labels of the task are none."""
    data, loss, why = config.node("data"), config.loss, f"needs a class for each sample, and task={task.name} has none"
    found = [UserError(f"data.{key}={data[key]}", why, f"data.{key}=0") for key in ("mixup", "cutmix") if data.get(key)]
    if config.sampler._target_ == ClassBalancedSampler._target_:
        found.append(UserError("sampler=class_balanced", why, "sampler=each_once"))
    if str(loss.get("_target_")) == CrossEntropyLoss._target_:
        found.append(UserError("loss=cross_entropy", why, task.typed_loss()))
    for key in ("weight", "pos_weight"):
        if loss.get(key) == "balanced":
            found.append(UserError(f"loss.{key}=balanced", why, f"loss.{key}=null"))
    if share := loss.get("label_smoothing"):
        found.append(UserError(f"loss.label_smoothing={spelled(share)}", why, task.typed_loss()))
    return found


def _option(node: Mapping[str, Any]) -> str:
    """The word for a loss of :meth:`Task.loss` that a user can type."""
    return {"torch.nn.MSELoss": "mse", "torch.nn.BCEWithLogitsLoss": "binary_cross_entropy"}.get(
        str(node["_target_"]), "cross_entropy"
    )
