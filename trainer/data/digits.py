"""data=digits: the real handwritten digits that scikit-learn ships."""

from __future__ import annotations

from trainer.data.base import DataSource, Facts, Splits
from trainer.data.pictures import Centre, Preprocessing

SAMPLES = 1797
MEAN, STD = (0.305,), (0.376,)


class Digits(DataSource):
    """1,797 images (1, 8, 8) of 10 digits (UCI Optical Recognition of Handwritten Digits), split by a seed."""

    def facts(self, global_batch_size: int) -> Facts:
        val = round(SAMPLES * self.config["val_fraction"])
        return Facts("scikit-learn's handwritten digits", "real", SAMPLES - val, val, (1, 8, 8), 10)

    def open(self, facts: Facts) -> Splits:
        import numpy as np
        import torch
        from sklearn.datasets import load_digits

        from trainer.data.arrays import ArrayDataset

        bunch = load_digits()
        images = torch.from_numpy((bunch.images / 16.0).astype(np.float32)).unsqueeze(1)
        labels = torch.from_numpy(bunch.target.astype(np.int64))
        order = torch.from_numpy(np.random.default_rng(self.config["split_seed"]).permutation(SAMPLES))
        val, train = order[: facts.val_samples], order[facts.val_samples :]
        return Splits(ArrayDataset(images[train], labels[train]), ArrayDataset(images[val], labels[val]), MEAN, STD)

    sees_pictures = True

    def preprocessing(self, facts: Facts) -> Preprocessing:
        """Light strokes on dark ground, 8 x 8 points."""
        return Preprocessing(Centre(8, 8, channels=1), MEAN, STD)
