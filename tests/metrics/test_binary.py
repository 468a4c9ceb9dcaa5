"""The binary task's metrics are scikit-learn's, over any number of workers, ties and one-class batches included."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata
from sklearn import metrics as truth
from torch import nn

from trainer.metrics import binary, ranking
from trainer.metrics.binary import BinaryObjective

NEAR = 1e-12
LOGITS = st.lists(
    st.sampled_from([-700.0, -20.0, -17.0, -3.0, -0.5, -NEAR, 0.0, NEAR, 0.25, 2.0, 40.0, 41.0]),
    min_size=2,
    max_size=40,
)


def area_by_ranks(labels: np.ndarray, scores: np.ndarray) -> float:
    """The truth, in O(n log n): Mann and Whitney's formula with mid-ranks."""
    positive = labels > 0
    count = int(positive.sum())
    return float((rankdata(scores)[positive].sum() - count * (count + 1) / 2) / (count * (len(labels) - count)))


class Together:
    """A sum over the workers of one process, which run in threads."""

    def __init__(self, workers: int) -> None:
        self.barrier, self.brought = threading.Barrier(workers), {}

    def total(self, index: int, values: torch.Tensor) -> torch.Tensor:
        self.brought[index] = values
        self.barrier.wait()
        summed = torch.stack([self.brought[k] for k in sorted(self.brought)]).sum(0)
        self.barrier.wait()
        return summed


def over_workers(task: BinaryObjective, vectors: list[torch.Tensor]) -> list[torch.Tensor]:
    """What each worker gets of its own sums and of a plain vector of its number."""
    together = Together(len(vectors))

    def work(index: int) -> list[torch.Tensor]:
        plain = torch.tensor([float(index)], dtype=torch.float64)
        return task.over_workers(partial(together.total, index), index, len(vectors), [vectors[index]], [plain])

    with ThreadPoolExecutor(len(vectors)) as pool:
        results = list(pool.map(work, range(len(vectors))))
    assert all(torch.equal(whole, results[0][0]) for whole, _ in results), "the same on all workers, bit for bit"
    assert all(plain.item() == sum(range(len(vectors))) for _, plain in results)
    return results[0]


def measured(logits: np.ndarray, labels: np.ndarray, parts: list[np.ndarray], **options: float) -> dict[str, float]:
    """The metrics from the sums of several workers, each with its part of the samples."""
    task = BinaryObjective(nn.BCEWithLogitsLoss(), **options)
    vectors = []
    for part in parts:
        exam = task.exam(len(vectors), len(parts))
        for batch in np.array_split(part, 2):
            if len(batch):
                wanted = torch.from_numpy(labels[batch])
                loss, outputs = task.forward(nn.Identity(), torch.from_numpy(logits[batch]), wanted)
                exam.add(loss, outputs, wanted, len(batch), batch)
        vectors.append(exam.sums())
    return task.validation(over_workers(task, vectors)[0])


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
        assert found["auc"] == pytest.approx(truth.roc_auc_score(labels, logits), abs=1e-12)
        assert found["auc"] == pytest.approx(area_by_ranks(labels, logits), abs=1e-12)
    assert "auc_error" not in found


def test_loss_is_log_loss_and_auc_is_exact() -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(size=20000) * 2
    labels = (generator.random(20000) < 1 / (1 + np.exp(-logits))).astype(int)
    found = measured(logits, labels, [np.arange(20000)])
    assert found["loss"] == pytest.approx(truth.log_loss(labels, 1 / (1 + np.exp(-logits))))
    assert found["auc"] == pytest.approx(area_by_ranks(labels, logits), abs=1e-12)


@pytest.mark.filterwarnings("error")
def test_infinite_scores_are_ties_and_nan_ranks_lowest() -> None:
    """scikit-learn refuses both, so the truth has finite scores in the same order."""
    generator = np.random.default_rng(0)
    scores = generator.choice([-np.inf, np.nan, -1.0, 0.5, np.inf], 200)
    positive = generator.random(200) < 0.4
    parts = [ranking.ranked(scores[part], positive[part]) for part in np.array_split(np.arange(200), 3)]
    whole = ranking.merged(parts, 1 << 10)
    assert whole[:, 0].tolist() == whole[:, 1].tolist() == [-np.inf, -1.0, 0.5, np.inf]
    finite = np.nan_to_num(scores, nan=-9.0, neginf=-9.0, posinf=9.0)
    found = ranking.area(whole)
    assert found is not None and found[0] == pytest.approx(truth.roc_auc_score(positive, finite), abs=1e-12)
    many = np.concatenate([scores, generator.normal(size=500)])
    few = ranking.merged([ranking.ranked(many, generator.random(700) < 0.5)], 64)
    assert len(few) <= 64 and ranking.area(few) is not None


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


def test_rows_that_differ_by_less_than_a_bucket_are_ranked() -> None:
    """Former versions measured 0.5 here: all logits of the first part in one bucket, all of the second beyond the
    last."""
    generator = np.random.default_rng(2)
    labels = generator.integers(2, size=22)
    for logits in (1.0 + generator.normal(size=22) * 1e-6, 30 + generator.normal(size=22), -50 * generator.random(22)):
        assert measured(logits, labels, [np.arange(22)])["auc"] == pytest.approx(area_by_ranks(labels, logits), abs=0)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("kind", ["wide", "narrow with outliers", "ties", "rising", "rare"])
def test_the_error_of_many_scores_is_known_and_small(kind: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary, "VALIDATION_SCORES", 1 << 10)
    monkeypatch.setattr(binary, "CHUNK", 1 << 11)
    generator = np.random.default_rng(3)
    count = 20_000
    logits = generator.normal(size=count) * 2
    if kind == "narrow with outliers":
        logits = np.where(generator.random(count) < 0.99, 1 + logits * 1e-9, logits * 1e6)
    elif kind == "ties":
        logits = np.where(generator.random(count) < 0.6, generator.integers(3, size=count), logits)
    elif kind == "rising":
        logits.sort()
    chance = 1 / (1 + np.exp(-logits.clip(-30, 30)))
    labels = (generator.random(count) < chance * (0.005 if kind == "rare" else 1)).astype(int)
    parts = np.array_split(np.arange(count), workers)
    found = measured(logits, labels, list(parts))
    error = abs(found["auc"] - area_by_ranks(labels, logits))
    assert 0 < found["auc_error"] < 0.02 and error <= found["auc_error"] + 1e-12


def test_frequent_scores_stay_exact_among_many_others() -> None:
    generator = np.random.default_rng(4)
    scores = np.concatenate([np.repeat([0.25, 0.5, 0.75], 500), generator.random(300)])
    labels = generator.integers(2, size=len(scores))
    table = ranking.merged([ranking.ranked(scores, labels > 0)], 64)
    assert len(table) <= 64
    for score in (0.25, 0.5, 0.75):
        row = table[(table[:, 0] == score) & (table[:, 1] == score)]
        assert row[:, 2:].sum() >= 500


def test_parts_of_an_epoch_add_up_in_any_order() -> None:
    task, generator = BinaryObjective(nn.BCEWithLogitsLoss()), np.random.default_rng(5)
    logits, labels = generator.integers(9, size=300) / 4, generator.integers(2, size=300)
    vectors = []
    for part in np.array_split(np.arange(300), 7):
        meter = task.meter()
        meter.add(torch.tensor(0.0), torch.from_numpy(logits[part]), torch.from_numpy(labels[part]), len(part))
        vectors.append(meter.sums())
    for order in (range(7), [3, 1, 6, 0, 2, 5, 4]):
        found = task.summary(reduce(task.add, [vectors[k] for k in order]))
        assert found["auc"] == pytest.approx(area_by_ranks(labels, logits), abs=1e-12)


def test_no_samples_no_metrics_and_placeholders_do_not_count() -> None:
    task = BinaryObjective(nn.BCEWithLogitsLoss())
    meter = task.meter()
    meter.add(torch.tensor(3.0), torch.ones(2), torch.ones(2), 0)
    sums = meter.sums()
    assert sums.shape == (6,) and not sums.any()
    assert task.summary(sums) == task.validation(sums) == {}


def test_what_is_not_a_number_is_a_miss_and_breaks_nothing() -> None:
    task = BinaryObjective(nn.BCEWithLogitsLoss())
    meter = task.meter()
    meter.add(torch.tensor(torch.nan), torch.tensor([torch.nan, torch.inf]), torch.tensor([1, 1]), 2)
    assert task.summary(meter.sums())["acc"] == 0.5
