"""What the loop wants of every task: how a batch becomes a loss, and sums over samples that become metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from trainer.metrics.examination import Examination


class Sums(Protocol):
    """A meter: batches seen since the last look."""

    def add(self, loss: torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor, samples: int) -> None:
        """Remember a batch."""

    def sums(self, device: Any = "cpu") -> torch.Tensor:
        """A float64 vector that adds up over workers, its last element the number of samples; and forget them."""

    def state(self) -> list[Any]:
        """What was seen since the last look, for ``load``."""

    def load(self, state: Sequence[Any]) -> None:
        """Go on from there; tensors are on the device of those that come."""


class Exam(Protocol):
    """A whole validation of one worker."""

    def add(
        self, loss: torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor, samples: int, numbers: np.ndarray
    ) -> None:
        """Take in a batch: as of a meter, and the samples' numbers in the validation data (N,)."""

    def sums(self) -> torch.Tensor:
        """A float64 vector that adds up over workers, its last element the number of samples."""


class Task(Protocol):
    """What is learnt: how a batch becomes a loss, and how sums over samples become metrics."""

    def forward(self, model: nn.Module, inputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch's mean loss and its outputs."""

    def meter(self) -> Sums:
        """An empty collection of sums."""

    def summary(self, sums: torch.Tensor) -> dict[str, float]:
        """The metrics of the samples behind the sums."""

    def exam(self, index: int, count: int) -> Exam:
        """An empty collection for a whole validation, for the worker of that number among so many."""

    def validation(self, sums: torch.Tensor) -> dict[str, float]:
        """The metrics of a whole validation, where there may be more to say."""

    def examined(self, sums: torch.Tensor) -> Examination | None:
        """What a whole validation found besides its metrics; None: nothing."""
