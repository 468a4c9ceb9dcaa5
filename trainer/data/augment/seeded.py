"""Samples whose augmentation follows from (seed, epoch, sample), not from the process that reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset, default_collate

from trainer.data.augment.global_generators import own_randomness, seed_for_sample

if TYPE_CHECKING:
    from trainer.data.augment.mixing import Mixing


class Seeded(Dataset[Any]):
    """Wraps a data set so that its augmentation depends on (seed, epoch, sample) alone, not on workers or processes."""

    def __init__(self, dataset: Any, seed: int, mixing: Mixing | None = None) -> None:
        self.dataset = dataset
        self.seed = seed
        self.mixing = mixing

    def __getitems__(self, address: tuple[int, np.ndarray]) -> Any:
        """The batch of these samples in that epoch, mixed where that is asked for."""
        epoch, addresses = address
        inputs, labels = self._batch(epoch, addresses)
        if self.mixing is None:
            return inputs, labels
        return self.mixing(inputs, labels, (self.seed, epoch), addresses)

    def _batch(self, epoch: int, indices: np.ndarray) -> Any:
        if hasattr(self.dataset, "augmented"):
            return self.dataset.augmented((self.seed, epoch), indices)
        if hasattr(self.dataset, "batch"):
            return self.dataset.batch(indices % len(self.dataset))
        with own_randomness():
            return default_collate([self._sample(epoch, index) for index in indices.tolist()])

    def __getitem__(self, address: tuple[int, int]) -> Any:
        epoch, index = address
        return self.__getitems__((epoch, np.array([index])))

    def _sample(self, epoch: int, index: int) -> Any:
        seed_for_sample(self.seed, epoch, index)
        return self.dataset[index % len(self.dataset)]
