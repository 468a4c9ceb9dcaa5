"""loss=log_loss: the reference's log loss of a probability, with a constant that keeps the logarithm finite."""

from __future__ import annotations

import torch
from torch import nn


class LogLoss(nn.Module):
    """The mean over samples of -(y log(p + epsilon) + (1 - y) log(1 - p + epsilon)), where p is the logit's sigmoid.

    Shapes:
        logits (N,), labels (N,) of 0 and 1; a scalar.
    """

    def __init__(self, epsilon: float = 1e-4) -> None:
        super().__init__()
        self.epsilon = epsilon

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        likely = logits.sigmoid()
        right = labels * (likely + self.epsilon).log() + (1 - labels) * (1 - likely + self.epsilon).log()
        return -right.mean()
