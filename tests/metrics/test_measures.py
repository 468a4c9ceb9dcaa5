"""A metric is added in one place: an entry in ``best.py``, or a class of one's own and no file of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as truth
from torch import nn

import trainer
from tests.runs import SMALL, points, read
from trainer.data.source import Facts
from trainer.metrics import best
from trainer.metrics.best import Measure
from trainer.metrics.binary import BinaryObjective
from trainer.metrics.classification import ClassObjective
from trainer.tasks.binary import Binary
from trainer.tasks.classification import Classification

FACTS = Facts("x", "x", 9, 9, (1,), 4)


def validated(task: Any, outputs: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """The metrics of a validation over these samples."""
    exam = task.exam(0, 1)
    loss, _ = task.forward(nn.Identity(), outputs, labels)
    exam.add(loss, outputs, labels, len(labels), np.arange(len(labels)))
    found: dict[str, float] = task.validation(exam.sums())
    return found


def miss_rate(hits: np.ndarray, labels: np.ndarray, guesses: np.ndarray) -> float:
    """One minus the mean recall over the classes that are a label."""
    there = labels > 0
    return float(1 - (hits[there] / labels[there]).mean())


def test_a_metric_of_classes_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(best.OF_CLASSES, "missed", Measure(miss_rate, lower=True))  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(3)
    outputs, labels = torch.randn(50, 4, generator=draw), torch.randint(0, 4, (50,), generator=draw)
    found = validated(ClassObjective(nn.CrossEntropyLoss(), 4), outputs, labels)
    assert found["missed"] == pytest.approx(1 - truth.balanced_accuracy_score(labels, outputs.argmax(1)))
    assert list(found) == Classification().metrics(FACTS), "the names that the plan knows"
    assert best.falling(best.OF_CLASSES) == ("missed",)


def test_a_metric_of_probabilities_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Measure(lambda hits, absolute, squared: 1 - hits, lower=True)
    monkeypatch.setitem(best.OF_PROBABILITIES, "wrong", wrong)  # type: ignore[arg-type]
    outputs, labels = torch.tensor([2.0, -1.0, 3.0, -2.0]), torch.tensor([1, 1, 0, 0])
    found = validated(BinaryObjective(nn.BCEWithLogitsLoss()), outputs, labels)
    assert found["wrong"] == truth.zero_one_loss(labels, outputs > 0) and list(found) == Binary().metrics(FACTS)
    assert best.falling(best.OF_PROBABILITIES) == ("mae", "mse", "rmse", "wrong")


class Misses:
    """A metric of one's own: the share of wrong guesses."""

    sums = ("wrong", "samples")
    higher_is_better = False

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.wrong = self.samples = 0

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.wrong += int((preds.argmax(1) != target).sum())
        self.samples += len(target)

    def compute(self) -> float:
        return self.wrong / self.samples


def test_a_metric_of_ones_own_marks_the_best_model_and_touches_no_file_of_the_trainer(tmp_path: Path) -> None:
    own = [f"metrics={{misses:{{_target_:{__name__}.Misses}}}}", "best.metric=val/misses"]
    trainer.run([*SMALL, *own, "epochs=2", "tracking=none", f"hydra.run.dir={tmp_path / 'run'}"])
    misses, hits = points(tmp_path / "run", "val/misses"), points(tmp_path / "run", "val/acc1")
    assert misses == pytest.approx([1 - share for share in hits]) and misses
    assert read(tmp_path / "run" / "result.json")["best"]["val/misses"] == min(misses)
