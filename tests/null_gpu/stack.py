"""Models: of so many layers, each a convolution with batch norm; and of one logit."""

from __future__ import annotations

import torch
from torch import nn


class Stack(nn.Module):
    """Images (N, 1, 8, 8) become scores (N, num_classes)."""

    def __init__(self, num_classes: int, depth: int) -> None:
        super().__init__()
        self.begin = nn.Conv2d(1, 8, 3, padding=1)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(depth))
        )
        self.end = nn.Linear(8, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.end(self.layers(self.begin(images)).mean((2, 3)))
        return scores


class Quiet:
    """A callback that asks for nothing."""

    def on_validation_end(self, *args: object, **kwargs: object) -> None:
        pass


class Logit(nn.Module):
    """Images (N, 1, 8, 8) become logits (N,)."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.end = nn.Linear(64, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.end(images.flatten(1))[:, 0]
        return logits
