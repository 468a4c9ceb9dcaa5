"""Data sources that the tests configure by ``_target_``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainer.data.sets.flowers import Drawing, Flowers102
from trainer.data.source import DataSource, Facts, Splits

SAMPLES = 64


class FewFlowers(Flowers102):
    """One picture of each class in each part stands in for Oxford's, and not ten, which take a minute to draw."""

    def _drawing(self) -> Drawing:
        return replace(super()._drawing(), per_class=1)


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
