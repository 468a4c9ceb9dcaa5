"""loss, acc1 and acc5 are what numpy counts, over any number of workers with any number of samples each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn

from trainer.data.sampler import EvaluationSampler
from trainer.metrics.classification import ClassificationMeter, ClassObjective, ranks_of_labels

SCORES = st.integers(1, 12).flatmap(
    lambda classes: arrays.arrays(
        np.float64,
        st.tuples(st.integers(1, 20), st.just(classes)),
        elements=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 7.0]),
    )
)  # few values, so that ties are common


def labels_for(scores: np.ndarray, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(scores.shape[1], size=len(scores))


def hits(scores: np.ndarray, labels: np.ndarray, k: int) -> np.ndarray:
    """Whether the label is among the k best, ties to the lower class, by numpy's stable sort."""
    best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return (best == labels[:, None]).any(1)


def cross_entropy(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    shifted = scores - scores.max(1, keepdims=True)
    return np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(labels)), labels]


@given(SCORES)
def test_hits_equal_numpys_with_ties_and_few_classes(scores: np.ndarray) -> None:
    labels = labels_for(scores)
    ranks = ranks_of_labels(torch.from_numpy(scores), torch.from_numpy(labels)).numpy()
    for k in (1, 5):
        np.testing.assert_array_equal(ranks < k, hits(scores, labels, k))


@given(SCORES, st.integers(1, 6), st.integers(1, 7))
def test_metrics_are_exact_over_unequal_workers_and_batches(scores: np.ndarray, world_size: int, batch: int) -> None:
    labels = labels_for(scores)
    classes = scores.shape[1]
    task = ClassObjective(nn.CrossEntropyLoss(), classes)
    sums = torch.zeros(5, dtype=torch.float64)
    for rank in range(world_size):
        meter = task.meter()
        for indices in EvaluationSampler(len(labels), batch, rank, world_size):
            inputs, wanted = torch.from_numpy(scores[indices]), torch.from_numpy(labels[indices])
            loss, outputs = task.forward(nn.Identity(), inputs, wanted)
            meter.add(loss, outputs, wanted, len(indices))
        sums += meter.sums()
    assert sums[-1] == len(labels)
    metrics = task.summary(sums)
    assert metrics["loss"] == pytest.approx(cross_entropy(scores, labels).mean(), abs=1e-12)
    assert metrics["acc1"] == pytest.approx(hits(scores, labels, 1).mean(), abs=1e-15)
    second = 5 if classes >= 5 else max(1, classes - 1)
    assert metrics[f"acc{second}"] == pytest.approx(hits(scores, labels, second).mean(), abs=1e-15)
    assert set(metrics) == {"loss", "acc1", f"acc{second}"}, "of 3 classes no acc5, which would always be 1"


@pytest.mark.parametrize("classes", [1, 2, 4, 5, 6, 102])
def test_output_that_is_not_a_number_is_never_a_hit(classes: int) -> None:
    labels = torch.arange(classes)
    for outputs in (torch.full((classes, classes), torch.nan), torch.eye(classes).fill_diagonal_(torch.nan)):
        meter = ClassificationMeter()
        meter.add(torch.tensor(0.0), outputs, labels, classes)
        assert meter.sums().tolist() == [0.0, classes, 0.0, 0.0, classes]


def test_a_number_beside_one_that_is_none_is_no_first_hit() -> None:
    outputs = torch.tensor([[3.0, torch.nan, 1.0], [3.0, 2.0, torch.inf]])
    assert ranks_of_labels(outputs, torch.tensor([0, 2])).tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_short_numbers_are_counted_without_loss(dtype: torch.dtype) -> None:
    meter = ClassificationMeter()
    outputs = torch.eye(3, dtype=dtype)
    for _ in range(3000):
        meter.add(torch.tensor(1.0, dtype=dtype), outputs, torch.tensor([0, 1, 0]), 3)
    assert meter.sums().tolist() == [9000.0, 9000.0, 6000.0, 9000.0, 9000.0]


def test_placeholders_do_not_count_and_sums_are_forgotten_when_taken() -> None:
    meter = ClassificationMeter()
    meter.add(torch.tensor(5.0), torch.ones(1, 3), torch.tensor([0]), 0)
    assert meter.sums().tolist() == [0.0] * 5
    meter.add(torch.tensor(2.0), torch.eye(3), torch.arange(3), 3)
    assert meter.sums().tolist() == [6.0, 3.0, 3.0, 3.0, 3.0]
    assert meter.sums().tolist() == [0.0] * 5
    assert ClassObjective(nn.CrossEntropyLoss(), 3).summary(meter.sums()) == {}


def test_a_remembered_batch_holds_no_graph() -> None:
    weight = torch.ones(3, requires_grad=True)
    outputs = torch.eye(3) * weight
    meter = ClassificationMeter()
    meter.add(outputs.sum(), outputs, torch.arange(3), 3)
    assert not meter.seen[0][0].requires_grad and not meter.seen[0][1].requires_grad
