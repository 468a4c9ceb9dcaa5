"""data=random_images: noise with random labels, to measure how fast training can go."""

from __future__ import annotations

from typing import Any

from trainer.config.schema import RandomImagesData
from trainer.data.source import DataSource, Facts, Splits
from trainer.errors import UserError

POOL = 64


class RandomImages(DataSource):
    """data=random_images: ``batches`` global batches per epoch of noise (3, S, S) with random labels.
    There are 64 images in turn, or with ``fresh`` new ones at each use."""

    Options = RandomImagesData
    options: RandomImagesData

    def facts(self, global_batch_size: int) -> Facts:
        size = self.options.image_size
        train, val = self.options.batches * global_batch_size, self.options.val_batches * global_batch_size
        self._labels_below(self.options.num_classes or 102)
        return Facts("random images", "random", train, val, (3, size, size), self.options.num_classes or 102)

    def image_preprocessing(self, facts: Facts) -> dict[str, Any]:
        """Return that images are not preprocessed: the drawn numbers between 0 and 1 are the inputs."""
        return {"resize": None, "crop": None, "channels": 3, "divide": None, "mean": None, "std": None}

    def open(self, facts: Facts) -> Splits:
        import torch

        below, fresh = self._labels_below(facts.classes), self.options.fresh
        size = self.options.image_size
        shape = 3, size, size
        kept = None
        if not fresh:
            generator = torch.Generator().manual_seed(0)
            images = torch.rand((POOL, *shape), generator=generator)
            kept = images, torch.randint(below, (POOL,), generator=generator)
        sets = [
            _noise(n, shape, below, kept, which) for which, n in enumerate((facts.train_samples, facts.val_samples))
        ]
        return Splits(*sets)

    def _labels_below(self, classes: int) -> int:
        """The number below which labels are drawn.

        Raises:
            UserError: ``data.labels_below`` is more than the number of classes.
        """
        below = self.options.labels_below
        if below is not None and below > classes:
            raise UserError(
                f"data.labels_below={below}", f"is more than data.num_classes={classes}", f"data.labels_below={classes}"
            )
        return below or classes


def _noise(samples: int, shape: tuple[int, ...], below: int, kept: Any, which: int) -> Any:
    """A data set of noise: images that are kept and used in turn, or each new from (seed, epoch, address)."""
    import numpy as np
    import torch
    from torch.utils.data import Dataset

    class Noise(Dataset[Any]):
        def __len__(self) -> int:
            return samples

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            images, labels = self.augmented((0, 0), np.array([index]))
            return images[0], labels[0]

        def augmented(self, draw: tuple[int, int], addresses: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
            if kept is not None:
                chosen = torch.from_numpy(addresses % samples % POOL)
                return kept[0][chosen], kept[1][chosen]
            lots = [np.random.default_rng((*draw, which, address)) for address in addresses.tolist()]
            images = np.stack([one.random(shape, np.float32) for one in lots])
            return torch.from_numpy(images), torch.tensor([int(one.integers(below)) for one in lots])

    return Noise()
