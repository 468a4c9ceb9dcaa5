"""Metrics that decide something: the best model by any of them, and an early stop."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from trainer.config.run_config import RunConfig
from trainer.config.schema import BestConfig
from trainer.data.source import Facts
from trainer.metrics import best as watched
from trainer.metrics.best import Best, EarlyStop
from trainer.metrics.binary import BinaryObjective
from trainer.metrics.classification import ClassObjective
from trainer.metrics.contract import Objective
from trainer.planning.task_checks import SHIPPED
from trainer.run_folder.report import Report
from trainer.tasks.binary import Binary
from trainer.tasks.classification import Classification
from trainer.tasks.contract import best_metric


def facts(task: str = "classification", classes: int = 10, **more: object) -> Facts:
    return Facts("x", "x", 10, 10, (1, 8, 8), classes, task=task, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("classes", [1, 2, 3, 4, 5, 10])
def test_what_is_known_before_the_start_is_what_a_classification_measures(classes: int) -> None:
    task = ClassObjective(nn.CrossEntropyLoss(), classes)
    labels = torch.arange(8) % classes
    assert watched.names(Classification().measured(facts(classes=classes)), False) == names_of(
        task, torch.randn(8, classes), labels
    )
    assert watched.names(Classification().measured(facts(classes=10)), True) == [
        "val/loss",
        "val/acc1",
        "val/acc5",
        "val/f1",
        "val_ema/loss",
        "val_ema/acc1",
        "val_ema/acc5",
        "val_ema/f1",
    ]


@pytest.mark.parametrize("ceiling", [None, 0.9])
def test_what_is_known_before_the_start_is_what_is_measured_of_labels_0_and_1(ceiling: float | None) -> None:
    known = {} if ceiling is None else {"auc": ceiling}
    task = BinaryObjective(nn.BCEWithLogitsLoss(), ceiling)
    measured = names_of(task, torch.randn(8), torch.arange(8) % 2)
    assert watched.names(Binary().measured(facts("binary", ceiling=known)), False) == measured
    assert watched.names(Binary().measured(facts("binary", ceiling=known)), True) == measured + [
        name.replace("val/", "val_ema/") for name in measured
    ]


def names_of(task: Objective, outputs: torch.Tensor, labels: torch.Tensor) -> list[str]:
    """The metrics of a validation of one batch, named as the report names them."""
    exam = task.exam(0, 1)
    exam.add(torch.tensor(1.0), outputs, labels, len(labels), np.arange(len(labels)))
    return [watched.RAW + name for name in task.validation(exam.sums())]


@pytest.mark.parametrize(
    ("metric", "values", "improved"),
    [
        ("val/loss", [2.0, 1.0, 1.0, 1.5, 0.5], [True, True, False, False, True]),
        ("val/acc1", [0.0, 0.1, 0.1, 0.05, 0.2], [True, True, False, False, True]),
        ("val_ema/rmse", [2.0, 3.0, 1.0], [True, False, True]),
        ("val/auc_share", [-0.5, -0.4], [True, True]),
        ("val/acc1", [math.nan, 0.0, None, 0.1], [False, True, False, True]),
    ],
)
def test_the_metrics_name_tells_what_is_better(metric: str, values: list[float], improved: list[bool]) -> None:
    best = Best(metric)
    assert [best.improved(step, value) for step, value in enumerate(values)] == improved
    assert best.step == max(step for step, better in enumerate(improved) if better)


def test_a_difference_that_is_too_small_is_none() -> None:
    best = Best("val/loss", min_delta=0.1)
    assert [best.improved(n, v) for n, v in enumerate((1.0, 0.95, 0.91, 0.89, 0.8))] == [
        True,
        False,
        False,
        True,
        False,
    ]


def test_the_report_says_when_the_model_is_the_best_by_the_metric_that_was_asked_for(tmp_path: Path) -> None:
    curve = [{"val/loss": 2.0, "val/acc1": 0.1}, {"val/loss": 1.0, "val/acc1": 0.3}, {"val/loss": 1.5, "val/acc1": 0.4}]
    for metric, kept, step in (("val/loss", [True, True, False], 2), ("val/acc1", [True, True, True], 3)):
        report = Report(tmp_path, 10, metric)
        assert [report.validation(0, n + 1, values) for n, values in enumerate(curve)] == kept
        assert report.outcome()["best"] == {"val/loss": 1.0, "val/acc1": 0.4}
        assert report.outcome()["best_step"] == step
        report.close()
    assert Report(None, 10, "val/loss").validation(0, 1, {"val/loss": 1.0}), "every worker knows"


def test_the_averaged_weights_have_a_line_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    Report(None, 10).validation(3, 7, {"val/loss": 2.0, "val/acc1": 0.25, "val_ema/loss": 1.0, "val_ema/acc1": 0.5})
    assert capsys.readouterr().out == (
        "[Epoch 3] validation loss: 2.00000, acc1: 0.25000\n"
        "[Epoch 3] validation of the averaged weights loss: 1.00000, acc1: 0.50000\n"
    )


def test_a_validation_of_one_class_has_no_auc_and_no_best_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, none, both = Report(tmp_path, 10, "val/auc"), {"val/loss": 1.0}, {"val/loss": 1.0, "val/auc": 0.5}
    assert [report.validation(0, n, values) for n, values in enumerate([none, none, both, none])] == [
        False,
        False,
        True,
        False,
    ]
    report.close()
    said = [line for line in capsys.readouterr().out.splitlines() if "ATTENTION" in line]
    assert len(said) == 2, "once, until it is measured again"
    assert all("val/auc cannot be measured, because all labels of the validation data are the same" in s for s in said)


def test_an_early_stop_waits_for_its_patience_and_says_why() -> None:
    stop = EarlyStop("val/acc1", patience=2, min_delta=0.01)
    said = [stop.why(step, {"val/acc1": v}) for step, v in ((10, 0.5), (20, 0.505), (30, 0.6), (40, 0.6), (50, 0.609))]
    assert said[:4] == [""] * 4
    assert said[4] == (
        "early stop at update 50: val/acc1 has not risen by more than 0.01 for 2 validations (best 0.60000 at "
        "update 30)"
    )
    falling = EarlyStop("val/loss", patience=1, min_delta=0.0)
    assert falling.why(1, {"val/loss": 1.0}) == ""
    assert "val/loss has not fallen for 1 validation (best 1.00000 at update 1)" in falling.why(2, {"val/loss": 1.0})
    assert "never was a number" in EarlyStop("val/loss", 1, 0.0).why(1, {"val/loss": math.nan})


@pytest.mark.parametrize(
    ("given", "task", "metric"),
    [(None, "classification", "val/acc1"), (None, "binary", "val/auc"), ("val/loss", "binary", "val/loss")],
)
def test_the_best_model_goes_by_the_tasks_own_metric_unless_told(given: str | None, task: str, metric: str) -> None:
    assert best_metric(RunConfig(best=BestConfig(given), task=SHIPPED[task]())) == metric
