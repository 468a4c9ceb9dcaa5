"""The protocols of a task that the loop trains: a batch becomes a loss, and sums over samples become metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from trainer.metrics.exchange import Total


class Loss(NamedTuple):
    """The loss of a batch: its mean ``value`` (), and the ``denominator`` that it was divided by."""

    value: torch.Tensor
    denominator: float


Seen = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, float]
"""A batch: its mean loss (), outputs, labels, how many samples count, and the loss's denominator."""


class KeptBatches:
    """The part of a meter that keeps batches until their sums are taken."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []

    def add(self, loss: Loss | torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor, samples: int) -> None:
        """Keep a batch: its mean loss, outputs and labels, and how many of its samples count."""
        if samples:
            value, denominator = loss if isinstance(loss, Loss) else (loss, float(samples))
            self.seen.append((value.detach(), outputs.detach(), labels, samples, denominator))

    def state(self) -> list[Any]:
        """The batches seen since the sums were last taken, for :meth:`load`."""
        return list(self.seen)

    def load(self, state: Sequence[Any]) -> None:
        """Restore what :meth:`state` returned."""
        self.seen = [tuple(batch) for batch in state]


class Sums(Protocol):
    """Protocol of a task's meter: collects batches, and returns their sums."""

    def add(self, loss: Loss | torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor, samples: int) -> None:
        """Add a batch's loss, outputs and labels. A loss that is a tensor () is the mean over the samples."""

    def sums(self, device: Any = "cpu") -> torch.Tensor:
        """Return the sums and empty the meter: a float64 vector, the number of samples last. See ``Objective.add``.

        Sums on a GPU are not waited for.
        """

    def state(self) -> list[Any]:
        """The batches seen since the sums were last taken, for :meth:`load`."""

    def load(self, state: Sequence[Any]) -> None:
        """Restore what :meth:`state` returned; its tensors are on the device of the batches to come."""


class Exam(Protocol):
    """Protocol of one worker's sums over a whole validation."""

    def add(
        self, loss: Loss | torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor, samples: int, numbers: np.ndarray
    ) -> None:
        """Add a validation batch like a meter's, with its samples' indices (N,) in the validation data."""

    def sums(self) -> torch.Tensor:
        """Return the sums: a float64 vector, with the sample count last. See ``Objective.over_workers``."""


class Examined(Protocol):
    """Protocol of what a whole validation found besides its metrics."""

    @property
    def samples(self) -> Sequence[int]:
        """The validation samples whose inputs and files are kept beside it."""

    def arrays(self) -> Mapping[str, Any]:
        """Return it as arrays by name, from which ``Task.pictures`` draws."""


class Objective(Protocol):
    """Protocol of a task: how a batch becomes a loss, and how sums over samples become metrics."""

    def forward(
        self, model: nn.Module, inputs: Any, labels: torch.Tensor, denominator: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model on a batch; returns the mean loss, 0 without a denominator, and the outputs."""

    def meter(self) -> Sums:
        """Return a new, empty meter for training."""

    def add(self, sums: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Return the sums of the samples of both, on the device of the first."""

    def over_workers(
        self, total: Total, index: int, count: int, parts: Sequence[torch.Tensor], plain: Sequence[torch.Tensor] = ()
    ) -> list[torch.Tensor]:
        """Return the sums of each part over the samples of all workers. A collective call.

        Args:
            total: sums a float64 vector over the workers.
            index: this worker's place among ``count``.
            plain: vectors that simply add up and travel along; their sums come last.
        """

    def summary(self, sums: torch.Tensor, epoch: torch.Tensor | None = None) -> dict[str, float]:
        """Compute the metrics from the sums; with the sums of an ``epoch``, also metrics of the epoch that are no mean
        of its lines."""

    def exam(self, index: int, count: int) -> Exam:
        """Return a new, empty exam for a whole validation, for worker ``index`` of ``count``."""

    def validation(self, sums: torch.Tensor) -> dict[str, float]:
        """Compute the metrics of a whole validation, which can have more than :meth:`summary`."""

    def kept(self, sums: torch.Tensor) -> torch.Tensor:
        """Return of a validation's sums what :meth:`examined` needs, and the sample count last."""

    def examined(self, sums: torch.Tensor) -> Examined | None:
        """Return what a whole validation found besides its metrics, or None."""
