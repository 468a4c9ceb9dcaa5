"""What the loop wants of every task: how a batch becomes a loss, and sums over samples that become metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from trainer.metrics.examination import Examination


class Sums(Protocol):
    """A task's meter: the batches seen since the sums were last taken."""

    def add(self, loss: torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor, samples: int) -> None:
        """Add a batch's loss, outputs and labels to the sums."""

    def sums(self, device: Any = "cpu") -> torch.Tensor:
        """Take the sums: a float64 vector that adds up over workers, its last element the number of samples; the
        meter is empty then."""

    def state(self) -> list[Any]:
        """The batches seen since the sums were last taken, for ``load``."""

    def load(self, state: Sequence[Any]) -> None:
        """Go on from a ``state``; its tensors are on the device of the batches to come."""


class Exam(Protocol):
    """One worker's sums over a whole validation."""

    def add(
        self, loss: torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor, samples: int, numbers: np.ndarray
    ) -> None:
        """Add a validation batch: as a meter's, and the samples' numbers in the validation data (N,)."""

    def sums(self) -> torch.Tensor:
        """The sums: a float64 vector that adds up over workers, its last element the number of samples."""


class Objective(Protocol):
    """What the loop learns and measures by: how a batch becomes a loss, and sums over samples become metrics."""

    def forward(self, model: nn.Module, inputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model on a batch: its mean loss and its outputs."""

    def meter(self) -> Sums:
        """A new, empty meter for training."""

    def summary(self, sums: torch.Tensor, epoch: torch.Tensor | None = None) -> dict[str, float]:
        """The metrics of the samples behind the sums; of a line of training, too, of the ``epoch`` so far what lines
        cannot be averaged to."""

    def exam(self, index: int, count: int) -> Exam:
        """A new, empty exam for a whole validation, for worker ``index`` of ``count``."""

    def validation(self, sums: torch.Tensor) -> dict[str, float]:
        """The metrics of a whole validation, which may have more than :meth:`summary`."""

    def examined(self, sums: torch.Tensor) -> Examination | None:
        """What a whole validation found besides its metrics; None: nothing."""
