"""A small convnet for CIFAR-10, as in the reference project."""

from __future__ import annotations

import torch
from torch import nn


class Convnet(nn.Module):
    """Three unpadded 3x3 convolutions (32, 64, 64 channels), max-pool 2 after the first two, linear 64, linear out.

    Shapes:
        input (N, 3, 32, 32), output (N, num_classes).
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, num_classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(self.features(images))
        return logits
