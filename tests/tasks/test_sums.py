"""Metrics of numbers and of sets of labels are what numpy computes, over any number of workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as truth
from torch import nn

from trainer.data.source import Facts
from trainer.metrics.contract import Loss
from trainer.metrics.points import MOST, WORST
from trainer.tasks.multi_label import MultiLabel
from trainer.tasks.regression import Regression
from trainer.tasks.summed import Summed

SAMPLES, BATCH = 3000, 64


def facts(task: str, columns: int) -> Facts:
    return Facts("x", "x", SAMPLES, SAMPLES, (4,), columns, task=task)


def validated(task: Summed, outputs: torch.Tensor, labels: torch.Tensor, workers: int) -> tuple[dict[str, float], Any]:
    """The metrics and the findings of a validation whose samples are dealt out to workers in batches."""
    loss = nn.MSELoss() if isinstance(task, Regression) else nn.BCEWithLogitsLoss()
    objective = task.objective(loss, facts(task.labels, labels.reshape(len(labels), -1).shape[1]), ())
    exams = [objective.exam(index, workers) for index in range(workers)]
    for number, start in enumerate(range(0, len(labels), BATCH)):
        part = slice(start, start + BATCH)
        value = loss(*task.compared(outputs[part], labels[part]))
        numbers = np.arange(len(labels))[part]
        counted = Loss(value, float(len(numbers)))
        shown = task.compared(outputs[part], labels[part])[0]
        exams[number % workers].add(counted, shown, labels[part], len(numbers), numbers)
    vectors = [exam.sums() for exam in exams]
    total = objective.over_workers(lambda own: torch.stack(vectors).sum(0), 0, workers, [vectors[0]])[0]
    return objective.validation(total), objective.examined(total)


@pytest.mark.parametrize("columns", [0, 1, 3])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_mae_rmse_and_r2_are_what_numpy_computes(columns: int, workers: int) -> None:
    draw = torch.Generator().manual_seed(columns)
    labels = torch.randn(*((SAMPLES, columns) if columns else (SAMPLES,)), generator=draw) * 3 + 100
    outputs = labels.reshape(SAMPLES, -1) + torch.randn(SAMPLES, max(1, columns), generator=draw)
    found, points = validated(Regression(), outputs, labels, workers)
    y, p = labels.double().reshape(SAMPLES, -1).numpy(), outputs.double().numpy()
    assert found["mae"] == pytest.approx(np.abs(p - y).mean(), rel=1e-12)
    assert found["rmse"] == pytest.approx(np.sqrt(((p - y) ** 2).mean()), rel=1e-12)
    r2 = (1 - ((p - y) ** 2).sum(0) / ((y - y.mean(0)) ** 2).sum(0)).mean()
    assert found["r2"] == pytest.approx(r2, rel=1e-8)
    assert found["loss"] == pytest.approx(((p - y) ** 2).mean(), rel=1e-5)
    worst = np.abs(p - y).max(1).argsort(kind="stable")[::-1][:WORST]
    assert points.samples == worst.tolist()
    alone = validated(Regression(), outputs, labels, 1)[1]
    assert len(points.numbers) == MOST and points.numbers.tolist() == alone.numbers.tolist()
    np.testing.assert_array_equal(points.labels, y[points.numbers])
    np.testing.assert_array_equal(points.outputs, p[points.numbers])


def test_labels_that_are_all_equal_have_no_r2() -> None:
    assert "r2" not in validated(Regression(), torch.randn(100, 1), torch.full((100,), 0.1), 1)[0]


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_f1_exact_and_average_precision_are_those_of_sklearn(workers: int) -> None:
    draw = torch.Generator().manual_seed(1)
    labels = (
        torch.rand(SAMPLES, 4, generator=draw) > torch.tensor([0.2, 0.5, 0.9, 2.0])
    ).float()  # nobody has the last
    outputs = (labels + torch.randn(SAMPLES, 4, generator=draw) - 0.5).mul(8).round() / 8  # with ties
    found, counts = validated(MultiLabel(threshold=0.6), outputs, labels, workers)
    y, likely = labels.numpy(), 1 / (1 + np.exp(-outputs.double().numpy()))
    guess, there = likely > 0.6, y.sum(0) + (likely > 0.6).sum(0) > 0
    assert found["f1"] == pytest.approx(truth.f1_score(y[:, there], guess[:, there], average="macro", zero_division=0))
    assert found["f1_micro"] == pytest.approx(truth.f1_score(y, guess, average="micro"))
    assert found["exact"] == (guess == y.astype(bool)).all(1).mean()
    each = [truth.average_precision_score(y[:, k], outputs[:, k].numpy()) for k in range(3)]
    np.testing.assert_allclose(counts.precisions[:3], each, rtol=1e-12)
    assert found["map"] == pytest.approx(np.mean(each), rel=1e-12) and np.isnan(counts.precisions[3])
    assert counts.hits.tolist() == (guess & (y > 0)).sum(0).tolist() and counts.labels.tolist() == y.sum(0).tolist()


def test_outputs_that_are_no_numbers_are_mistakes_and_no_crash() -> None:
    labels = torch.ones(8, 2)
    found, _ = validated(MultiLabel(), torch.full((8, 2), torch.nan), labels, 2)
    assert found["f1"] == 0.0 and found["exact"] == 0.0
    _, points = validated(Regression(), torch.full((8, 2), torch.nan), labels, 2)
    assert len(points.samples) == 8
