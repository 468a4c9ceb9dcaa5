"""data=random_images: noise with random labels, to measure how fast training can go."""

from __future__ import annotations

from typing import Any

from trainer.config.schema import RandomImagesData
from trainer.data.source import DataSource, Facts, Splits

POOL = 64


class RandomImages(DataSource):
    """data=random_images: ``batches`` global batches per epoch of (3, S, S) noise with random labels; 64 distinct
    images are used in turn."""

    Options = RandomImagesData
    options: RandomImagesData

    def facts(self, global_batch_size: int) -> Facts:
        size = self.options.image_size
        train, val = self.options.batches * global_batch_size, self.options.val_batches * global_batch_size
        return Facts("random images", "random", train, val, (3, size, size), self.options.num_classes or 102)

    def image_preprocessing(self, facts: Facts) -> dict[str, Any]:
        """Nothing is done to an image: the drawn numbers between 0 and 1 are the inputs."""
        return {"resize": None, "crop": None, "channels": 3, "divide": None, "mean": None, "std": None}

    def open(self, facts: Facts) -> Splits:
        import torch
        from torch.utils.data import Dataset

        generator = torch.Generator().manual_seed(0)
        images = torch.rand((POOL, *facts.shape), generator=generator)
        labels = torch.randint(facts.classes, (POOL,), generator=generator)

        class Pool(Dataset[Any]):
            def __init__(self, samples: int) -> None:
                self.samples = samples

            def __len__(self) -> int:
                return self.samples

            def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
                return images[index % POOL], labels[index % POOL]

            def batch(self, indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
                chosen = torch.as_tensor(indices) % POOL
                return images[chosen], labels[chosen]

        return Splits(Pool(facts.train_samples), Pool(facts.val_samples))
