"""Models as a user would bring them, and some that break on purpose."""

from __future__ import annotations

import os
import signal

import torch
from torch import nn


class Mlp(nn.Module):
    """One hidden layer on flattened images."""

    def __init__(self, num_classes: int, hidden: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


class Talks(Mlp):
    """Prints what it should keep to itself."""

    def __init__(self, num_classes: int, hub_token: str) -> None:
        super().__init__(num_classes)
        print("logging in with", hub_token, flush=True)


class Breaks(Mlp):
    """Breaks at a chosen forward of a chosen rank."""

    def __init__(self, num_classes: int, how: str = "raise", rank: int = 0, at: int = 3) -> None:
        super().__init__(num_classes)
        self.how, self.rank, self.at, self.count = how, rank, at, 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.count += self.training
        if self.count == self.at and os.environ.get("RANK", "0") == str(self.rank):
            if self.how == "raise":
                raise ValueError("the model broke on purpose")
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "infinite":
                return super().forward(images) * float("inf")
        return super().forward(images)
