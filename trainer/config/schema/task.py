"""task: what labels are, which loss, which metrics, what ``predict`` writes, which pictures."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.schema.declare import key


@dataclass
class TaskConfig:
    """task: what is learnt of the labels."""

    _target_: str = key("???", "class, a trainer.tasks.contract.Task")


@dataclass
class AutoTask(TaskConfig):
    """task=auto: the task for the labels that the data have."""

    _target_: str = key("trainer.tasks.contract.auto", "replaced when the kind of the data's labels is known")


@dataclass
class ClassificationTask(TaskConfig):
    """task=classification: one class for each sample; loss, acc1, acc5 and f1."""

    _target_: str = key("trainer.tasks.classification.Classification", "class, a trainer.tasks.contract.Task")


@dataclass
class BinaryTask(TaskConfig):
    """task=binary: labels 0 and 1, and one logit; loss, auc, acc, mae, mse and rmse."""

    _target_: str = key("trainer.tasks.binary.Binary", "class, a trainer.tasks.contract.Task")


@dataclass
class MultiLabelTask(TaskConfig):
    """task=multi_label: a set of labels for each sample, a logit for each label; loss, map, f1, f1_micro and exact."""

    _target_: str = key("trainer.tasks.multi_label.MultiLabel", "class, a trainer.tasks.contract.Task")
    threshold: float = key(0.5, "a label is in the predicted set if its probability is above", gt=0, lt=1)


@dataclass
class RegressionTask(TaskConfig):
    """task=regression: one number or several for each sample; loss, mae, rmse and r2."""

    _target_: str = key("trainer.tasks.regression.Regression", "class, a trainer.tasks.contract.Task")
