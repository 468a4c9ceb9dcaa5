"""The binary task's metrics are scikit-learn's, over any number of workers, ties and one-class batches included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as truth
from torch import nn

from trainer.metrics.binary import BUCKETS, LIMIT, Binary

WIDTH = 2 * LIMIT / BUCKETS
LOGITS = st.lists(st.sampled_from([-20.0, -3.0, -0.5, -WIDTH, 0.0, WIDTH, 0.25, 2.0, 15.9, 40.0]), min_size=2, max_size=40)  # fmt: skip


def measured(logits: np.ndarray, labels: np.ndarray, parts: list[np.ndarray], **options: float) -> dict[str, float]:
    """The metrics from the sums of several workers, each with its part of the samples."""
    task = Binary(nn.BCEWithLogitsLoss(), **options)
    sums = task.meter().sums()
    for part in parts:
        meter = task.meter()
        for batch in np.array_split(part, 2):
            if len(batch):
                wanted = torch.from_numpy(labels[batch])
                loss, outputs = task.forward(nn.Identity(), torch.from_numpy(logits[batch]), wanted)
                meter.add(loss, outputs, wanted, len(batch))
        sums += meter.sums()
    return task.validation(sums)


@settings(deadline=None)
@given(LOGITS, st.integers(0, 99), st.integers(1, 5))
def test_metrics_are_those_of_scikit_learn(chosen: list[float], seed: int, workers: int) -> None:
    logits = np.array(chosen)
    labels = np.random.default_rng(seed).integers(2, size=len(logits))
    found = measured(logits, labels, np.array_split(np.arange(len(logits)), workers))
    p = 1 / (1 + np.exp(-logits))
    assert found["loss"] == pytest.approx(np.mean(np.logaddexp(0, logits) - labels * logits))
    assert found["acc"] == pytest.approx(truth.accuracy_score(labels, logits > 0))
    assert found["mae"] == pytest.approx(truth.mean_absolute_error(labels, p))
    assert found["mse"] == pytest.approx(truth.mean_squared_error(labels, p))
    assert found["rmse"] == pytest.approx(np.sqrt(found["mse"]))
    if labels.min() == labels.max():
        assert "auc" not in found
    else:
        assert found["auc"] == pytest.approx(truth.roc_auc_score(labels, logits.clip(-LIMIT, LIMIT)), abs=1e-12)


def test_loss_is_log_loss_and_auc_is_exact_up_to_the_buckets() -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(size=20000) * 2
    labels = (generator.random(20000) < 1 / (1 + np.exp(-logits))).astype(int)
    found = measured(logits, labels, [np.arange(20000)])
    assert found["loss"] == pytest.approx(truth.log_loss(labels, 1 / (1 + np.exp(-logits))))
    assert found["auc"] == pytest.approx(truth.roc_auc_score(labels, logits), abs=1e-5)


def test_any_division_over_workers_gives_the_same() -> None:
    generator = np.random.default_rng(1)
    logits, labels = generator.normal(size=999), generator.integers(2, size=999)
    alone = measured(logits, labels, [np.arange(999)])
    for workers in (2, 3, 7):
        order = generator.permutation(999)
        cuts = np.sort(generator.integers(0, 999, workers - 1))
        together = measured(logits, labels, np.split(order, cuts))
        assert together["auc"] == alone["auc"] and together["acc"] == alone["acc"]
        assert together == pytest.approx(alone, rel=1e-12)


def test_a_validation_says_how_far_it_is_to_the_ceiling() -> None:
    logits, labels = np.array([0.0, 1.0, 2.0, 3.0]), np.array([0, 1, 0, 1])
    found = measured(logits, labels, [np.arange(4)], ceiling=0.9)
    assert found["auc"] == 0.75 and found["auc_share"] == pytest.approx(0.25 / 0.4)
    assert "auc_share" not in measured(logits, labels, [np.arange(4)])


def test_no_samples_no_metrics_and_placeholders_do_not_count() -> None:
    task = Binary(nn.BCEWithLogitsLoss())
    meter = task.meter()
    meter.add(torch.tensor(3.0), torch.ones(2), torch.ones(2), 0)
    sums = meter.sums()
    assert sums.shape == (4 + 2 * BUCKETS + 1,) and not sums.any()
    assert task.summary(sums) == task.validation(sums) == {}


def test_what_is_not_a_number_is_a_miss_and_breaks_nothing() -> None:
    task = Binary(nn.BCEWithLogitsLoss())
    meter = task.meter()
    meter.add(torch.tensor(torch.nan), torch.tensor([torch.nan, torch.inf]), torch.tensor([1, 1]), 2)
    assert task.summary(meter.sums())["acc"] == 0.5
