"""A data source and a network small enough to train dozens of times: what a user adds with --config-dir."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from trainer.data.arrays.tensors import ArrayDataset
from trainer.data.source import DataSource, Facts, Splits

CLASSES = 7
SIDE = 8


def images(
    samples: int, seed: int, shape: tuple[int, int, int] = (1, SIDE, SIDE), noise: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """(N, *shape) float64 noise around one picture per class, and labels (N,)."""
    generator = np.random.default_rng(seed)
    pictures = np.random.default_rng(99).normal(size=(CLASSES, *shape))
    labels = generator.integers(CLASSES, size=samples)
    return pictures[labels] + noise * generator.normal(size=(samples, *shape)), labels


class TinyImages(DataSource):
    """Noisy pictures of seven classes; with ``augment``, a random shift and noise per sample."""

    def facts(self, global_batch_size: int) -> Facts:
        train, val = self.config["train_samples"], self.config["val_samples"]
        side = self.config.get("side", SIDE)
        return Facts("tiny noise", "tiny", train, val, (self.config.get("channels", 1), side, side), CLASSES)

    def open(self, facts: Facts) -> Splits:
        shape, noise = facts.shape, self.config.get("noise", 1.0)
        train = [torch.from_numpy(a) for a in images(facts.train_samples, 1, shape, noise)]
        val = [torch.from_numpy(a) for a in images(facts.val_samples, 2, shape, noise)]
        kind = Augmented if self.config["augment"] else ArrayDataset
        return Splits(kind(*train), ArrayDataset(*val))


class Augmented(Dataset[Any]):
    """Each sample flipped, shifted and noisy at random, from all three generators that augmentations draw from."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.inputs[index] + torch.randn(()) + np.random.normal()
        return torch.roll(image, random.randrange(SIDE), -1), self.labels[index]


class NormNet(nn.Module):
    """Convolution, batch norm, linear; ``seeded=False`` draws its start from the clock, as a careless model does."""

    def __init__(self, num_classes: int, image_size: int, in_channels: int = 1, seeded: bool = True) -> None:
        super().__init__()
        if not seeded:
            torch.seed()
        self.features = nn.Sequential(nn.Conv2d(in_channels, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.classifier = nn.Linear(4 * image_size**2, num_classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(inputs).flatten(1))


class Gated(nn.Module):
    """Samples go one way or the other by their first pixel, so that a step may use one branch alone; ``never`` is never
    used.

    ``gated=False``: all samples go the first way.
    """

    def __init__(self, num_classes: int, image_size: int, gated: bool = True) -> None:
        super().__init__()
        self.stem = nn.Linear(image_size**2, 12)
        self.ways = nn.ModuleList([nn.Linear(12, 12) for _ in range(2)])
        self.never = nn.Linear(12, 12)
        self.head = nn.Linear(12, num_classes)
        self.gated = gated

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.stem(inputs.flatten(1)))
        second = (inputs[:, 0, 0, 0] > 1.5) & self.gated
        passed = torch.zeros_like(hidden)
        for chosen, way in zip((~second, second), self.ways, strict=True):
            if chosen.any():
                passed = passed.masked_scatter(chosen.unsqueeze(1), way(hidden[chosen]))
        return self.head(passed)


class Flat(nn.Module):
    """One matrix: the gradient of n samples has rank n at most."""

    def __init__(self, num_classes: int, image_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(image_size**2, num_classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs.flatten(1))


class Layered(nn.Module):
    """Convolutions, which channels_last lays out otherwise, and weights that lie transposed or with gaps in memory
    whatever the format; no batch norm, so that workers together are one process on the whole batch."""

    def __init__(self, num_classes: int, image_size: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 6, 3, 2, padding=1), nn.Tanh()
        )
        self.classifier = nn.Linear(6 * (image_size // 2) ** 2, num_classes)
        self.classifier.weight = nn.Parameter(self.classifier.weight.detach().t().contiguous().t())
        self.gains = nn.Parameter(torch.ones(num_classes, 6)[:, ::3])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(inputs).flatten(1)) * self.gains.prod(1)
