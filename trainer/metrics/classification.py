"""The metrics of a classification: loss, acc1, acc5, macro F1, as sums that add up exactly over workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.host.transfers import on_its_way
from trainer.metrics.best import OF_CLASSES, best_of
from trainer.metrics.confusion import Examination, Tally, tally_of
from trainer.metrics.contract import KeptBatches, Loss
from trainer.metrics.criterion import Criterion
from trainer.metrics.exchange import Total, summed

HEAD = 4
"""Loss, its denominator, hits of acc1, hits of acc5 come first in a vector of sums."""


def ranks_of_labels(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """For each sample, how many classes rank before its label, by output and then by class number.

    Args:
        outputs: (N, C) scores; labels: (N,) of 0..C-1.

    Returns:
        (N,) of 0..C-1: 0 is a hit of acc1, below 5 one of acc5. Where the label's output is not a number, at least 5.
    """
    score = outputs.gather(1, labels.unsqueeze(1))
    number = torch.arange(outputs.shape[1], device=outputs.device)
    before = ~(outputs <= score) | ((outputs == score) & (number < labels.unsqueeze(1)))
    return before.sum(1).masked_fill(score.squeeze(1).isnan(), max(5, outputs.shape[1]))


class ClassObjective:
    """The task of a classification: a model with class scores, its loss, and sums from which the metrics follow.

    Args:
        loss: of outputs (N, C) and labels (N,), or shares of classes (N, C).
        classes: of the model; of fewer than 5, all but one take the place of 5 in ``acc5`` (3 classes: ``acc2``).
        there: of these the ones that the data have, over which the metrics of classes go; empty: all.
    """

    def __init__(self, loss: nn.Module, classes: int, there: Sequence[int] = ()) -> None:
        self.loss = loss if isinstance(loss, Criterion) else Criterion(loss)
        self.classes = classes
        self.there = sorted(there) or list(range(classes))
        self.best_of = best_of(classes)

    def forward(
        self, model: nn.Module, inputs: Any, labels: torch.Tensor, denominator: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model on a batch; returns the mean loss, 0 without a denominator, and the outputs."""
        outputs = model(inputs)
        return self.loss(outputs, labels, denominator, model.training), outputs

    def meter(self) -> ClassificationMeter:
        """Return a new, empty meter for training."""
        return ClassificationMeter(self.best_of)

    def exam(self, index: int, count: int) -> ClassExam:
        """Return a new, empty exam for a whole validation."""
        return ClassExam(self.meter(), self.classes, index, count)

    def add(self, sums: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Return the sums of the samples of both, on the device of the first."""
        return sums + others.to(sums.device)

    def over_workers(
        self, total: Total, index: int, count: int, parts: Sequence[torch.Tensor], plain: Sequence[torch.Tensor] = ()
    ) -> list[torch.Tensor]:
        """Return each of the parts over all workers, then each plain vector: one collective call."""
        return summed(total, parts, plain)

    def summary(self, sums: torch.Tensor, epoch: torch.Tensor | None = None) -> dict[str, float]:
        """Compute loss, acc1 and acc5 from the sums of one worker, or of all added up.
        All are means, so that there is no more to tell of the epoch."""
        samples = sums[-1].item()
        if not samples:
            return {}
        loss, denominator, *hits = sums[:HEAD].tolist()
        names = ("acc1", f"acc{self.best_of}")  # of one or two classes, they are one
        shares = {name: total / samples for name, total in zip(names, hits, strict=True)}
        return {**({"loss": loss / denominator} if denominator else {}), **shares}

    def validation(self, sums: torch.Tensor) -> dict[str, float]:
        """Compute the metrics of a whole validation: ``summary``, and those of the counts of the classes."""
        if not (metrics := self.summary(sums)):
            return {}
        counts = [part[self.there] for part in tally_of(self.classes, sums[HEAD:-1]).by_class()]
        return {**metrics, **{name: measure.value(*counts) for name, measure in OF_CLASSES.items()}}

    def kept(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the sums of a whole validation, all of which :meth:`examined` needs."""
        return sums

    def examined(self, sums: torch.Tensor) -> Examination:
        """Return the counts by class and the worst mistakes of a whole validation."""
        return tally_of(self.classes, sums[HEAD:-1]).examination(self.validation(sums))


class ClassificationMeter(KeptBatches):
    """The meter of a classification: keeps the batches seen, and computes only when the sums are taken.

    Args:
        best_of: a label among so many best scores is a hit of acc5.
    """

    def __init__(self, best_of: int = 5) -> None:
        super().__init__()
        self.best_of = best_of

    def add(self, loss: Loss | torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor, samples: int) -> None:
        """Keep a batch: its mean loss, outputs (N, C), labels, and how many samples count.
        Labels are (N,) or shares of classes (N, C), of which the greatest counts as the label."""
        super().add(loss, outputs, labels if labels.dim() == 1 else labels.argmax(1), samples)

    def sums(self, device: Any = "cpu") -> torch.Tensor:
        """Return the sums (5,) float64 and empty the meter: loss, its denominator, hits of acc1, hits of acc5,
        samples."""
        if not self.seen:
            return torch.zeros(HEAD + 1, dtype=torch.float64, device=device)
        losses, outputs, labels, samples, denominators = zip(*self.seen, strict=True)
        self.seen = []
        known = torch.tensor([samples, denominators], dtype=torch.float64)
        count, parts = on_its_way(known, losses[0].device)
        ranks = ranks_of_labels(torch.cat(outputs), torch.cat(labels))
        loss = (torch.stack(losses).double() * parts).sum()
        hits = [(ranks < best).sum().double() for best in (1, self.best_of)]
        return torch.stack([loss, parts.sum(), *hits, count.sum()])


class ClassExam:
    """The exam of a classification: its sums, the confusion counts, and the worst mistakes."""

    def __init__(self, meter: ClassificationMeter, classes: int, index: int, count: int) -> None:
        self.meter = meter
        self.sum: torch.Tensor | None = None
        self.tally = Tally(classes, index, count)

    def add(
        self, loss: Loss | torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor, samples: int, numbers: np.ndarray
    ) -> None:
        """Add a validation batch, with its samples' indices (N,) in the validation data."""
        self.meter.add(loss, outputs, labels, samples)
        sums = self.meter.sums()
        self.sum = sums if self.sum is None else self.sum + sums
        self.tally.add(outputs, labels, numbers)

    def sums(self) -> torch.Tensor:
        """Return the vector of loss, denominator, hits, hits; the tally; samples; on the device of the outputs."""
        whole = self.meter.sums() if self.sum is None else self.sum
        return torch.cat([whole[:HEAD], self.tally.vector(), whole[HEAD:]])
