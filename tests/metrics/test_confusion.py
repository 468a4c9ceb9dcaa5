"""Counts by class and the worst mistakes are those of scikit-learn and numpy, over any number of workers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as truth
from torch import nn

from trainer.data.sampler import EvaluationSampler
from trainer.metrics import confusion
from trainer.metrics.classification import ClassObjective
from trainer.metrics.confusion import WORST, Examination, Tally, guessed


def drawn(seed: int, samples: int, classes: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores (N, outputs) that are often tied, and labels (N,) of ``classes``, some of which never come."""
    draw = np.random.default_rng(seed)
    return draw.integers(-3, 4, (samples, outputs)) / 2, draw.integers(0, max(1, classes - 1), samples)


def examined(scores: np.ndarray, labels: np.ndarray, classes: int, workers: int, batch: int) -> Examination:
    """What so many workers find together."""
    task = ClassObjective(nn.CrossEntropyLoss(), classes)
    total = torch.zeros(())
    for rank in range(workers):
        exam = task.exam(rank, workers)
        for numbers in EvaluationSampler(len(labels), batch, rank, workers).arrays():
            outputs, wanted = torch.from_numpy(scores[numbers]), torch.from_numpy(labels[numbers])
            loss, _ = task.forward(nn.Identity(), outputs, wanted)
            exam.add(loss, outputs, wanted, len(numbers), numbers)
        total = total + exam.sums()
    assert total[-1] == len(labels), "no sample twice, none left out"
    return task.examined(total)


CASES = st.tuples(
    st.integers(0, 99), st.integers(1, 60), st.integers(1, 8), st.integers(0, 2), st.integers(1, 4), st.integers(1, 7)
)


@given(CASES, st.booleans())
def test_counts_are_those_of_scikit_learn_over_unequal_workers(case: tuple[int, ...], many: bool) -> None:
    seed, samples, classes, further, workers, batch = case
    scores, labels = drawn(seed, samples, classes, classes + further)
    before, confusion.MOST_CLASSES = confusion.MOST_CLASSES, 0 if many else confusion.MOST_CLASSES
    try:
        found = examined(scores, labels, classes, workers, batch)
    finally:
        confusion.MOST_CLASSES = before
    guesses = np.argsort(-scores, axis=1, kind="stable")[:, 0]
    guesses = np.where(guesses < classes, guesses, classes)
    matrix = truth.confusion_matrix(labels, guesses, labels=range(classes + 1))[:classes]
    known = [c for c in range(classes) if c in labels or c in guesses]
    f1 = truth.f1_score(labels, guesses, labels=known, average="macro", zero_division=0.0)
    assert found.metrics["f1"] == pytest.approx(f1, abs=1e-12)
    recall = truth.recall_score(labels, guesses, labels=range(classes), average=None, zero_division=0.0)
    np.testing.assert_allclose(found.hits / np.maximum(found.labels, 1), recall, atol=1e-15)
    np.testing.assert_array_equal(found.guesses, matrix.sum(0)[:classes])
    if many:
        assert found.confusion is None
    else:
        np.testing.assert_array_equal(found.confusion, matrix)


@given(CASES)
def test_worst_mistakes_are_the_greatest_losses_among_the_wrong_guesses(case: tuple[int, ...]) -> None:
    seed, samples, classes, further, workers, batch = case
    scores, labels = drawn(seed, samples, classes, classes + further)
    logs = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    losses, guesses = -logs[np.arange(samples), labels], np.argmax(scores, 1)
    wrong = [n for n in range(samples) if guesses[n] != labels[n]]
    found = examined(scores, labels, classes, workers, batch).mistakes
    assert [m.loss for m in found] == pytest.approx(sorted(losses[wrong], reverse=True)[:WORST], abs=1e-12)
    for m in found:
        assert (m.label, m.guess) == (labels[m.number], guesses[m.number] if guesses[m.number] < classes else -1)
        assert m.loss == pytest.approx(losses[m.number], abs=1e-12)
        assert m.confidence == pytest.approx(np.exp(logs[m.number].max()), abs=1e-12)
    assert len({m.number for m in found}) == len(found)


def test_mistakes_are_the_same_however_samples_are_shared_out() -> None:
    scores, labels = drawn(7, 500, 6, 6)
    alone = examined(scores, labels, 6, 1, 500).mistakes
    assert len(alone) == WORST
    for workers in (2, 3, 5):
        assert [m.number for m in examined(scores, labels, 6, workers, 17).mistakes] == [m.number for m in alone]


def test_outputs_that_are_no_numbers_are_no_guess_and_do_not_spoil_the_sums() -> None:
    outputs = torch.tensor([[torch.nan, 1.0], [torch.nan, torch.nan], [torch.inf, 0.0], [3.0, 0.0]])
    assert guessed(outputs, 2).tolist() == [2, 2, 0, 0]
    mine = Tally(2)
    mine.add(outputs, torch.tensor([0, 1, 1, 1]), np.arange(4))
    found = confusion.tally_of(2, mine.vector()).examination({})
    assert found.confusion is not None and found.confusion.tolist() == [[0, 0, 1], [2, 0, 1]]
    assert {(m.number, m.guess) for m in found.mistakes} == {(0, -1), (1, -1), (2, 0), (3, 0)}
    assert all(np.isfinite(m.loss) for m in found.mistakes)


def test_perfect_guesses_leave_no_mistakes() -> None:
    found = examined(np.eye(4), np.arange(4), 4, 3, 2)
    assert found.mistakes == () and found.metrics == {
        "loss": pytest.approx(0.743668, abs=1e-5),
        "acc1": 1.0,
        "acc3": 1.0,
        "f1": 1.0,
    }


@pytest.mark.parametrize("many", [False, True])
def test_a_gpu_finds_the_same_with_tensors_of_fixed_sizes(many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confusion, "MOST_CLASSES", 0 if many else 102)
    scores, labels = drawn(11, 300, 5, 7)
    scores[3, 2] = np.nan
    cpu = [examined(scores, labels, 5, workers, 16).arrays() for workers in (1, 3)]
    monkeypatch.setattr(confusion, "_sizes_may_vary", lambda tensor: False)
    gpu = [examined(scores, labels, 5, workers, 16).arrays() for workers in (1, 3)]
    for one, other in zip(cpu, gpu, strict=True):
        assert set(one) == set(other) and all(np.array_equal(one[name], other[name]) for name in one)
