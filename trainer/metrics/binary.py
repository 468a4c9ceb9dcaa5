"""The metrics for labels 0 and 1: loss, AUC, accuracy, errors, over the samples of all workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.host.transfers import Arriving, Queue, on_its_way
from trainer.metrics.best import OF_PROBABILITIES
from trainer.metrics.contract import KeptBatches, Loss
from trainer.metrics.criterion import Criterion
from trainer.metrics.exchange import Total, gathered_rows
from trainer.metrics.ranking import COLUMNS, area, merged, ranked

HEAD = 5
"""Length of the head of a vector of sums: loss, its denominator, hits at 0.5, |p - y|, (p - y)^2. The ranking's rows
follow, and the number of samples."""
LINE_SCORES = 1 << 16
"""Distinct scores up to which the AUC of a line, and of the epoch so far, is exact; beyond, its error is known."""
VALIDATION_SCORES = 1 << 19
"""The same limit for a validation over all workers. Its ranking of 16 MiB also fits a message to a parameter server."""
CHUNK = 1 << 17
"""Samples of a validation that are ranked at a time."""


def _split(sums: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
    """Split a vector of sums into those that are added (5 sums and the samples), and its ranking (R, 4)."""
    flat = sums.cpu()
    return torch.cat([flat[:HEAD], flat[-1:]]), flat[HEAD:-1].numpy().reshape(-1, COLUMNS)


def _vector(head: torch.Tensor, ranking: np.ndarray) -> torch.Tensor:
    return torch.cat([head[:HEAD], torch.from_numpy(ranking.ravel()), head[HEAD:]])


def _added(sums: torch.Tensor, others: torch.Tensor, limit: int) -> torch.Tensor:
    (head, ranking), (more, other) = _split(sums), _split(others)
    return _vector(head + more, merged([ranking, other], limit))


class BinaryObjective:
    """The task of labels 0 and 1: a model with one logit, its loss, and sums from which the metrics follow.

    Args:
        loss: of outputs (N,) and labels (N,) of the outputs' type.
        ceiling: the AUC that no model can exceed, where it is known: a validation then also says ``auc_share``,
            which part of the way from 0.5 (a guess) to there is done.
    """

    def __init__(self, loss: nn.Module, ceiling: float | None = None) -> None:
        self.loss = loss if isinstance(loss, Criterion) else Criterion(loss)
        self.ceiling = ceiling

    def forward(
        self, model: nn.Module, inputs: Any, labels: torch.Tensor, denominator: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model on a batch; returns the mean loss, 0 without a denominator, and the logits (N,)."""
        outputs = model(inputs)
        return self.loss(outputs, labels.to(outputs.dtype), denominator, model.training), outputs

    def meter(self) -> BinaryMeter:
        """Return a new, empty meter for training."""
        return BinaryMeter()

    def exam(self, index: int, count: int) -> BinaryExam:
        """Return a new, empty exam for a whole validation."""
        return BinaryExam(VALIDATION_SCORES // count)

    def add(self, sums: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Return the sums of the samples of both."""
        return _added(sums, others, LINE_SCORES)

    def over_workers(
        self, total: Total, index: int, count: int, parts: Sequence[torch.Tensor], plain: Sequence[torch.Tensor] = ()
    ) -> list[torch.Tensor]:
        """Return each of the parts over all workers, then each plain vector; two collective calls at the most."""
        heads, rankings = zip(*(_split(part) for part in parts), strict=True)
        tables = [merged([ranking], VALIDATION_SCORES // count) for ranking in rankings]
        added, rows = gathered_rows(total, index, count, tables, [*heads, *(vector.cpu() for vector in plain)])
        whole = [_vector(head, merged(own, VALIDATION_SCORES)) for head, own in zip(added, rows, strict=False)]
        return [*whole, *added[len(parts) :]]

    def summary(self, sums: torch.Tensor, epoch: torch.Tensor | None = None) -> dict[str, float]:
        """Compute the metrics from the sums; without ``auc`` if all labels are equal.

        ``auc_error`` is the most that ``auc`` can be wrong by, where it is not exact.

        Args:
            epoch: the sums of the epoch so far; with them also ``auc_epoch``, its AUC. It is no mean of lines' AUCs.
        """
        head, ranking = _split(sums)
        samples = head[-1].item()
        if not samples:
            return {}
        loss, denominator, *others = head[:HEAD].tolist()
        means = [total / samples for total in others]
        areas = {"auc": area(ranking), "auc_epoch": None if epoch is None else area(_split(epoch)[1])}
        found = {name: value for name, value in areas.items() if value is not None}
        aucs = {name: value for name, (value, _) in found.items()}
        errors = {f"{name}_error": error for name, (_, error) in found.items() if error}
        return {
            **({"loss": loss / denominator} if denominator else {}),
            **aucs,
            **errors,
            **{name: measure.value(*means) for name, measure in OF_PROBABILITIES.items()},
        }

    def validation(self, sums: torch.Tensor) -> dict[str, float]:
        """Compute the metrics of a whole validation: ``summary``, and ``auc_share`` if the ceiling is known."""
        metrics = self.summary(sums)
        if self.ceiling is not None and "auc" in metrics:
            metrics["auc_share"] = (metrics["auc"] - 0.5) / (self.ceiling - 0.5)
        return metrics

    def kept(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the sums of a whole validation without its ranking, which nobody needs later."""
        return _split(sums)[0]

    def examined(self, sums: torch.Tensor) -> None:
        """Return None: a binary task has no findings besides its metrics."""


class BinaryMeter(KeptBatches):
    """The meter of a binary task: keeps the batches seen, and computes only when the sums are taken.

    Args:
        limit: rows of the ranking, at most.
    """

    def __init__(self, limit: int = LINE_SCORES) -> None:
        super().__init__()
        self.limit = limit

    def sums(self, device: Any = "cpu") -> torch.Tensor:
        """Return the sums (5 + 4 R + 1,) float64 on the CPU, and empty the meter.

        Loss times denominator, denominator, hits at 0.5, |p - y|, (p - y)^2, each summed over samples; the ranking (R,
        4) of the logits; samples.
        """
        if not self.seen:
            return torch.zeros(HEAD + 1, dtype=torch.float64)
        return self.ranked(*Arriving(self.numbers()).read())

    def numbers(self) -> list[torch.Tensor]:
        """Return the sums (6,), the logits (N,) and the labels (N,) of the batches, and empty the meter: float64 on the
        device of the batches."""
        losses, outputs, labels, samples, denominators = zip(*self.seen, strict=True)
        self.seen = []
        known = torch.tensor([samples, denominators], dtype=torch.float64)
        counts, parts = on_its_way(known, losses[0].device)
        logits, wanted = torch.cat(outputs).double(), torch.cat(labels).double()
        error = logits.sigmoid() - wanted
        head = torch.stack(
            [
                (torch.stack(losses).double() * parts).sum(),
                parts.sum(),
                ((logits > 0) == (wanted > 0.5)).sum().double(),
                error.abs().sum(),
                error.square().sum(),
                counts.sum(),
            ]
        )
        return [head, logits, wanted]

    def ranked(self, head: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the vector of sums of what :meth:`numbers` returned, on the CPU."""
        return _vector(head, merged([ranked(logits.numpy(), labels.numpy() > 0.5)], self.limit))


class BinaryExam:
    """The exam of a binary task: the sums of one worker's share of a validation.

    Args:
        limit: rows of the ranking, at most.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.waiting = limit, 0
        self.meter = BinaryMeter(limit)
        self.sum = self.meter.sums()
        self.chunks = Queue(self._rank)

    def add(
        self, loss: Loss | torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor, samples: int, numbers: np.ndarray
    ) -> None:
        """Add a validation batch to the sums."""
        self.meter.add(loss, outputs, labels, samples)
        self.waiting += samples
        if self.waiting >= CHUNK:
            self._end_chunk()

    def sums(self) -> torch.Tensor:
        """Return the sums over all batches so far, on the CPU."""
        self._end_chunk()
        self.chunks.finish()
        return self.sum

    def _end_chunk(self) -> None:
        if self.waiting:
            self.chunks.put(self.meter.numbers())
            self.waiting = 0

    def _rank(self, *numbers: torch.Tensor) -> None:
        self.sum = _added(self.sum, self.meter.ranked(*numbers), self.limit)
