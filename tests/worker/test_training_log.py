"""The epoch's AUC in a line of training is scikit-learn's over the epoch's samples so far, of all workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

from tests.worker.test_loop import Lines, Recording
from trainer.data.feed import Batch
from trainer.metrics.binary import BinaryObjective
from trainer.worker.loop import fit
from trainer.worker.nonfinite import Stop
from trainer.worker.training import LogWindow, Reporting, Schedule, Training, Watchers
from trainer.worker.training_log import merged_window

SIZES = [3, 4, 5, 4, 2]
"""Samples of an epoch's batches."""


class Logits(nn.Module):
    """The inputs are the logits already."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.factor


class Clicks:
    """Each epoch has other samples, whose labels go with their logits."""

    waited = 0.0

    def batch(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng((epoch, number))
        logits = generator.normal(size=SIZES[number])
        labels = (logits + generator.normal(size=SIZES[number]) > 0).astype(int)
        labels[:2] = 0, 1
        return logits, labels

    def updates(self, epoch: int, first: int = 0) -> Iterator[tuple[int, Iterator[Batch]]]:
        for number in range(first, len(SIZES)):
            logits, labels = map(torch.from_numpy, self.batch(epoch, number))
            yield len(labels), iter([Batch(logits, labels, len(labels), 1.0, True)])

    def auc(self, epoch: int, batches: range) -> float:
        """The truth."""
        seen = [self.batch(epoch, number) for number in batches]
        return float(roc_auc_score(np.concatenate([b[1] for b in seen]), np.concatenate([b[0] for b in seen])))


def training(lockstep: bool, log_every: int, epochs: int, **schedule: Any) -> Training:
    model, task = Logits(), BinaryObjective(nn.BCEWithLogitsLoss())
    schedule = {"val_every": 0, "val_every_steps": None, "validate": False, **schedule}
    return Training(
        model=model,
        forward=model,
        task=task,
        strategy=Recording(),
        feed=Clicks(),
        autocast=nullcontext,
        lockstep=lockstep,
        schedule=Schedule(epochs, epochs * len(SIZES), log_every, **schedule),
        watchers=Watchers(Stop()),
        reporting=Reporting(Lines(), LogWindow(task)),
    )


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("log_every", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("last_batch", [False, True])
def test_a_line_tells_of_the_epoch_so_far(lockstep: bool, log_every: int, last_batch: bool) -> None:
    run = training(lockstep, log_every, epochs=3, log_last_batch=last_batch)
    fit(run)
    for epoch, batch, _, metrics, _ in run.reporting.report.trained:
        assert metrics["auc_epoch"] == pytest.approx(run.feed.auc(epoch, range(batch + 1)), abs=1e-12), (epoch, batch)
    assert len({epoch for epoch, *_ in run.reporting.report.trained}) == 3
    assert run.reporting.report.samples == 2 * 3 * sum(SIZES), "the strategy doubles what all workers add up"


def test_a_line_over_two_epochs_averages_all_its_batches() -> None:
    run = training(True, 3, epochs=2)
    fit(run)
    epoch, batch, _, metrics, _ = run.reporting.report.trained[2]
    assert (epoch, batch) == (1, 1)
    seen = [run.feed.batch(0, 4), run.feed.batch(1, 0), run.feed.batch(1, 1)]
    truth = roc_auc_score(np.concatenate([b[1] for b in seen]), np.concatenate([b[0] for b in seen]))
    assert metrics["auc"] == pytest.approx(truth, abs=1e-12)


def test_without_both_classes_there_is_none() -> None:
    task = BinaryObjective(nn.BCEWithLogitsLoss())
    meter = task.meter()
    meter.add(torch.tensor(0.5), torch.ones(2), torch.ones(2), 2)
    ones = meter.sums()
    meter.add(torch.tensor(0.5), torch.zeros(1), torch.zeros(1), 1)
    both = task.add(ones, meter.sums())
    assert "auc_epoch" not in task.summary(ones, ones)
    found = task.summary(ones, both)
    assert "auc" not in found and found["auc_epoch"] == 1.0
    assert list(task.summary(both, both))[1:3] == ["auc", "auc_epoch"], "side by side on the screen"


class Added:
    """A task whose sums add up."""

    def add(self, sums: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return sums + others

    def meter(self) -> Added:
        return self

    def sums(self) -> torch.Tensor:
        return vector(0, 0)


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("lockstep", [True, False])
def test_more_or_fewer_workers_go_on_with_all_that_was_summed(workers: int, lockstep: bool) -> None:
    """What is each worker's own adds up to what it was, and what is of all workers stays so."""
    before = [
        {"batches": 4, "carried_sums": vector(n, 1), "epoch_sums": vector(n + 9 * (not lockstep), 7)} for n in (0, 0, 0)
    ]
    before = [{**line, "carried_sums": line["carried_sums"] + n} for n, line in enumerate(before)]
    after = [merged_window(before[rank::workers], before[0], lockstep, Added()) for rank in range(workers)]
    carried = [line["carried_sums"] for line in after]
    assert torch.equal(sum(carried), sum(line["carried_sums"] for line in before))
    sums = [line["epoch_sums"] for line in after if line["epoch_sums"] is not None]
    if lockstep:
        assert len(sums) == workers and all(torch.equal(epoch, before[0]["epoch_sums"]) for epoch in sums)
    else:
        assert torch.equal(sum(sums), sum(line["epoch_sums"] for line in before))
