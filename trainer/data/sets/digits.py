"""data=digits: the real handwritten digits that scikit-learn ships."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from trainer.config.schema import DigitsData
from trainer.data.limits import Limits
from trainer.data.picture_preprocessing import Centre, Preprocessing, normalisation
from trainer.data.source import DataSource, Facts, Splits, held_out
from trainer.errors import UserError

SAMPLES = 1797
MEAN, STD = (0.305,), (0.376,)


class Digits(DataSource):
    """data=digits: 1,797 images (1, 8, 8) of 10 handwritten digits (UCI Optical Recognition), split by a seed."""

    Options = DigitsData
    options: DigitsData

    def facts(self, global_batch_size: int) -> Facts:
        val, test = (round(SAMPLES * share) for share in (self.options.val_fraction, self.options.test_fraction))
        if SAMPLES - val - test < 1:
            raise UserError(
                f"data.test_fraction={self.options.test_fraction}",
                f"with data.val_fraction={self.options.val_fraction} nothing is left to train on",
                "data.test_fraction=0.1",
            )
        tested = f", the test {self.options.test_fraction:g} (data.test_fraction)" if test else ""
        return Facts(
            "scikit-learn's handwritten digits",
            "real",
            SAMPLES - val - test,
            val,
            (1, 8, 8),
            10,
            test_samples=test,
            splits=held_out(self.options, "the digits", tested),
        )

    def open(self, facts: Facts) -> Splits:
        import numpy as np
        import torch

        from trainer.data.arrays.tensors import ArrayDataset

        drawn, shown = read_digits()
        images = torch.from_numpy((drawn / 16.0).astype(np.float32)).unsqueeze(1)
        labels = torch.from_numpy(shown)
        order = torch.from_numpy(np.random.default_rng(self.options.split_seed).permutation(SAMPLES))
        val, test, train = order.split([facts.val_samples, facts.test_samples, facts.train_samples])
        learnt, held, tested = (ArrayDataset(images[part], labels[part]) for part in (train, val, test))
        return Splits(learnt, held, *normalisation(self.options, MEAN, STD), tested if len(test) else None)

    sees_pictures = True

    def preprocessing(self, facts: Facts) -> Preprocessing:
        """How a picture becomes an input like the digits: light strokes on dark ground, 8 x 8 pixels."""
        limits = Limits.of(self.options)
        return Preprocessing(Centre(8, 8, channels=1, limits=limits), *normalisation(self.options, MEAN, STD), limits)


def read_digits() -> tuple[Any, Any]:
    """Read the digits from scikit-learn's own file, without importing scikit-learn, which takes longer than an epoch.

    Returns:
        Strokes 0 to 16 as float64 (1797, 8, 8) and the digits as int64 (1797,), as ``sklearn.datasets.load_digits``.
    """
    import numpy as np

    package = importlib.util.find_spec("sklearn")
    places = (package.submodule_search_locations or []) if package is not None else []
    files = [file for place in places if (file := Path(place) / "datasets" / "data" / "digits.csv.gz").is_file()]
    if not files:  # another layout than that of 1.4 to 1.9
        from sklearn.datasets import load_digits

        bunch = load_digits()
        return bunch.images, bunch.target.astype(np.int64)
    table = np.loadtxt(files[0], delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)
