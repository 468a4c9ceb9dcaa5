"""Sets of small images in memory: whole batches are cut from one array and augmented as tensors."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from trainer.data.base import DataSource, Facts, Splits
from trainer.data.pictures import Centre, Preprocessing

Pair = tuple[Any, Any]
"""Images (N, C, H, W) uint8 and labels (N,) int64, as arrays of numpy."""


class ArraySource(DataSource):
    """Images of one size, all in memory.

    Attributes:
        mean, std: of the training images, by channel.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @abstractmethod
    def arrays(self, facts: Facts) -> tuple[Pair, Pair]:
        """The training and the validation samples."""

    def kept(self, samples: int, *shape: int) -> str:
        """What the plan says of the memory that they take."""
        total = samples
        for size in shape:
            total *= size
        return f"{total / 2**20:.0f} MiB as uint8, in memory of each worker"

    sees_pictures = True

    def preprocessing(self, facts: Facts) -> Preprocessing:
        channels, _, side = facts.shape
        return Preprocessing(Centre(side, side, channels), self.mean, self.std)  # type: ignore[arg-type]

    def open(self, facts: Facts) -> Splits:
        import torch

        from trainer.data.arrays import ArrayDataset
        from trainer.data.augment import Augmentation
        from trainer.data.augmented_arrays import AugmentedArrays

        train, val = ((torch.from_numpy(images), torch.from_numpy(labels)) for images, labels in self.arrays(facts))
        augmentation = Augmentation.of(self.config, self.mean)
        return Splits(
            AugmentedArrays(*train, self.config["pad_crop"], augmentation), ArrayDataset(*val), self.mean, self.std
        )
