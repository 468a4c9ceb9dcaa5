"""Models that draw from torch's generator in every forward of the training, and of validations."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Dropping(nn.Sequential):
    """Images (N, 1, 8, 8) to scores (N, 10), with dropout and batch norm."""

    def __init__(self, **shape: int) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10)
        )


class DroppingAlways(Dropping):
    """It draws in validations, too: another number of them is another training."""

    def forward(self, images: torch.Tensor) -> Any:
        if not self.training:
            torch.rand(1)
        return super().forward(images)
