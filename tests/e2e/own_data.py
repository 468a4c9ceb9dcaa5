"""Data sources that the tests configure by ``_target_``."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.data.sets.digits import Digits
from trainer.data.sets.flowers import Drawing, Flowers102
from trainer.data.source import DataSource, Facts, Splits

SAMPLES = 64


class FewFlowers(Flowers102):
    """One picture of each class in each part stands in for Oxford's, and not ten, which take a minute to draw."""

    def _drawing(self) -> Drawing:
        return replace(super()._drawing(), per_class=1)


class SlowTest(Digits):
    """The digits, whose test samples take their time once: while the file ``tests`` in the working folder is made."""

    def open(self, facts: Facts) -> Splits:
        splits = super().open(facts)
        return splits if Path("tests").exists() else replace(splits, test=Slow(splits.test))


class Slow:
    """A data set whose batches take half a second each."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside

    def __len__(self) -> int:
        return len(self.inside)

    def batch(self, indices: Any) -> Any:
        if len(indices) > 1:  # and not one that is looked at before the training
            Path("tests").touch()
            time.sleep(0.5)
        return self.inside.batch(indices)


class TrainingAlone(DataSource):
    """Noise (1, 8, 8) without any validation data."""

    def facts(self, global_batch_size: int) -> Facts:
        return Facts("noise", "drawn", SAMPLES, 0, (1, 8, 8), classes=10)

    def open(self, facts: Facts) -> Splits:
        import torch

        draw = torch.Generator().manual_seed(0)
        images, labels = torch.rand(SAMPLES, 1, 8, 8, generator=draw), torch.randint(10, (SAMPLES,), generator=draw)
        train: Any = torch.utils.data.TensorDataset(images, labels)
        return Splits(train, None)
