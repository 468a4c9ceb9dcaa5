"""The metrics for labels 0 and 1: loss, AUC, accuracy, errors, as sums that add up over workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trainer.metrics.classification import SummedExam

BUCKETS = 1 << 14
LIMIT = 16.0
"""The AUC is counted over buckets of logits in [-16, 16], 1/512 wide; what lies beyond counts as at the limit."""
HEAD = 4


def auc(positives: torch.Tensor, negatives: torch.Tensor) -> float | None:
    """The area under the ROC curve from two histograms (B,) over rising scores; None if a class has no sample.

    The share of pairs (a positive, a negative) in which the positive's score is greater, those in one bucket half.
    """
    pairs = positives.sum().item() * negatives.sum().item()
    if not pairs:
        return None
    below = negatives.cumsum(0) - negatives
    return float((positives * (below + 0.5 * negatives)).sum().item() / pairs)


def _auc(sums: torch.Tensor) -> float | None:
    return auc(sums[HEAD : HEAD + BUCKETS], sums[HEAD + BUCKETS : -1])


class Binary:
    """The task of labels 0 and 1: a model with one logit, its loss, and sums from which the metrics follow.

    Args:
        loss: called with (outputs (N,), labels (N,) of the outputs' type), returns the mean over the batch.
        ceiling: the AUC that no model can exceed, where it is known: a validation then also says ``auc_share``,
            which part of the way from 0.5 (a guess) to there is done.
    """

    def __init__(self, loss: nn.Module, ceiling: float | None = None) -> None:
        self.loss = loss
        self.ceiling = ceiling

    def forward(self, model: nn.Module, inputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model on a batch; returns the mean loss and the logits (N,)."""
        outputs = model(inputs)
        return self.loss(outputs, labels.to(outputs.dtype)), outputs

    def meter(self) -> BinaryMeter:
        """Return a new, empty meter for training."""
        return BinaryMeter()

    def exam(self, index: int, count: int) -> SummedExam:
        """Return a new, empty exam for a whole validation."""
        return SummedExam(self.meter())

    def summary(self, sums: torch.Tensor, epoch: torch.Tensor | None = None) -> dict[str, float]:
        """Compute the metrics from the sums; without ``auc`` if all labels are equal.

        Args:
            epoch: the sums of the epoch so far; with them also ``auc_epoch``, its AUC. It is no mean of lines' AUCs.
        """
        samples = sums[-1].item()
        if not samples:
            return {}
        loss, hits, absolute, squared = (total / samples for total in sums[:HEAD].tolist())
        areas = {"auc": _auc(sums), "auc_epoch": None if epoch is None else _auc(epoch)}
        ranked = {name: area for name, area in areas.items() if area is not None}
        return {"loss": loss, **ranked, "acc": hits, "mae": absolute, "mse": squared, "rmse": math.sqrt(squared)}

    def validation(self, sums: torch.Tensor) -> dict[str, float]:
        """Compute the metrics of a whole validation: ``summary``, and ``auc_share`` if the ceiling is known."""
        metrics = self.summary(sums)
        if self.ceiling is not None and "auc" in metrics:
            metrics["auc_share"] = (metrics["auc"] - 0.5) / (self.ceiling - 0.5)
        return metrics

    def examined(self, sums: torch.Tensor) -> None:
        """Return None: a binary task has no findings besides its metrics."""


class BinaryMeter:
    """The meter of a binary task: keeps the batches seen, and computes only when the sums are taken."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]] = []

    def add(self, loss: torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor, samples: int) -> None:
        """Keep a batch: its mean loss, logits (N,), labels (N,), and how many of its samples count."""
        if samples:
            self.seen.append((loss.detach(), outputs.detach(), labels, samples))

    def state(self) -> list[Any]:
        """The batches seen since the sums were last taken, for :meth:`load`."""
        return list(self.seen)

    def load(self, state: Sequence[Any]) -> None:
        """Restore what :meth:`state` returned."""
        self.seen = [tuple(batch) for batch in state]

    def sums(self, device: Any = "cpu") -> torch.Tensor:
        """Return the sums (4 + 2 * BUCKETS + 1,) float64, and empty the meter.

        Loss, hits at 0.5, |p - y|, (p - y)^2, each summed over samples; the logits' histogram of the positives, then
        of the negatives; samples.
        """
        if not self.seen:
            return torch.zeros(HEAD + 2 * BUCKETS + 1, dtype=torch.float64, device=device)
        losses, outputs, labels, samples = zip(*self.seen, strict=True)
        self.seen = []
        counts = torch.tensor(samples, dtype=torch.float64, device=losses[0].device)
        logits, wanted = torch.cat(outputs).double(), torch.cat(labels).double()
        error = logits.sigmoid() - wanted
        head = torch.stack([
            (torch.stack(losses).double() * counts).sum(), ((logits > 0) == (wanted > 0.5)).sum().double(),
            error.abs().sum(), error.square().sum(),
        ])  # fmt: skip
        bucket = ((logits.nan_to_num(-LIMIT).clamp(-LIMIT, LIMIT) + LIMIT) * (BUCKETS / (2 * LIMIT))).long()
        place = bucket.clamp_max(BUCKETS - 1) + BUCKETS * (wanted <= 0.5)
        histograms = torch.bincount(place, minlength=2 * BUCKETS).double()
        return torch.cat([head, histograms, counts.sum().view(1)])
