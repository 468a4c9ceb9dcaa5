"""A LeNet-style convnet for small single-channel images, as in the reference project."""

from __future__ import annotations

import torch
from torch import nn


class LeNet(nn.Module):
    """Two convolutions 5x5 (20 channels, ReLU, max-pool 2) and one linear layer.

    Args:
        num_classes: outputs.
        in_channels: channels of the image.
        image_size: height and width, a multiple of 4.

    Shapes:
        input (N, in_channels, image_size, image_size), output (N, num_classes).
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 1, image_size: int = 28) -> None:
        super().__init__()
        if image_size % 4:
            raise ValueError(f"image_size={image_size} must be a multiple of 4")
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 20, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(20, 20, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Linear(20 * (image_size // 4) ** 2, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images).flatten(1))  # type: ignore[no-any-return]
