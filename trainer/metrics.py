"""What is measured on a batch of a classification: loss, acc1, acc5, as sums that add up exactly over workers."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

NAMES = ("loss", "acc1", "acc5")


class Sums(Protocol):
    """A meter: batches seen since the last look."""

    def add(self, loss: torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor, samples: int) -> None:
        """Remember a batch."""

    def sums(self, device: Any = "cpu") -> torch.Tensor:
        """A float64 vector that adds up over workers, its last element the number of samples; and forget them."""


class Task(Protocol):
    """What is learnt: how a batch becomes a loss, and how sums over samples become metrics."""

    names: tuple[str, ...]

    def forward(self, model: nn.Module, inputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch's mean loss and its outputs."""

    def meter(self) -> Sums:
        """An empty collection of sums."""

    def summary(self, sums: torch.Tensor) -> dict[str, float]:
        """The metrics of the samples behind the sums."""

    def validation(self, sums: torch.Tensor) -> dict[str, float]:
        """The same for a whole validation, where there may be more to say."""


def ranks_of_labels(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """How many classes come before the label's, by greater output and then by lower number.

    Args:
        outputs: (N, C) scores; labels: (N,) of 0..C-1.

    Returns:
        (N,) of 0..C-1: 0 is a hit of acc1, below 5 one of acc5. Where the label's output is not a number, at least 5.
    """
    score = outputs.gather(1, labels.unsqueeze(1))
    number = torch.arange(outputs.shape[1], device=outputs.device)
    before = ~(outputs <= score) | ((outputs == score) & (number < labels.unsqueeze(1)))
    return before.sum(1).masked_fill(score.squeeze(1).isnan(), max(5, outputs.shape[1]))


class Classification:
    """Inputs to class scores: the loss, and the sums from which loss, acc1 and acc5 follow.

    Args:
        loss: called with (outputs (N, C), labels (N,)), returns the mean over the batch.
    """

    names: tuple[str, ...] = NAMES

    def __init__(self, loss: nn.Module) -> None:
        self.loss = loss

    def forward(self, model: nn.Module, inputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch's mean loss and its outputs."""
        outputs = model(inputs)
        return self.loss(outputs, labels), outputs

    def meter(self) -> Meter:
        """An empty collection of sums."""
        return Meter()

    def summary(self, sums: torch.Tensor) -> dict[str, float]:
        """Loss, acc1, acc5 over the samples behind the sums (of one worker, or added up over all)."""
        *totals, samples = sums.tolist()
        if not samples:
            return {}
        return {name: total / samples for name, total in zip(NAMES, totals, strict=True)}

    def validation(self, sums: torch.Tensor) -> dict[str, float]:
        """As ``summary``."""
        return self.summary(sums)


class Meter:
    """Batches seen since the last look; the arithmetic is done once, when somebody looks, not in every step."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]] = []

    def add(self, loss: torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor, samples: int) -> None:
        """Remember a batch: its mean loss, outputs (N, C), labels (N,) or shares of classes (N, C), of which the
        greatest counts as the label, and how many samples count."""
        if samples:
            self.seen.append(
                (loss.detach(), outputs.detach(), labels if labels.dim() == 1 else labels.argmax(1), samples)
            )

    def sums(self, device: Any = "cpu") -> torch.Tensor:
        """(4,) float64: loss summed over samples, hits of acc1, hits of acc5, samples; and forget them."""
        if not self.seen:
            return torch.zeros(4, dtype=torch.float64, device=device)
        losses, outputs, labels, samples = zip(*self.seen, strict=True)
        self.seen = []
        counts = torch.tensor(samples, dtype=torch.float64, device=losses[0].device)
        ranks = ranks_of_labels(torch.cat(outputs), torch.cat(labels))
        loss = (torch.stack(losses).double() * counts).sum()
        return torch.stack([loss, (ranks < 1).sum().double(), (ranks < 5).sum().double(), counts.sum()])
