"""Click-like samples with ids, and a network with sparse tables of every kind that a server may keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.data.arrays.tensors import ArrayDataset
from trainer.data.source import DataSource, Facts, Splits
from trainer.models.embedding_tables import RowEmbedding

ROWS = 50


def clicks(samples: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Inputs dense (N, 3) float64, ids (N, 4) and bag (N, 5) int64 with many repeats; labels (N,)."""
    generator = np.random.default_rng(seed)
    inputs = {
        "dense": generator.normal(size=(samples, 3)),
        "ids": np.minimum(generator.geometric(0.08, size=(samples, 4)), ROWS) - 1,
        "bag": generator.integers(ROWS, size=(samples, 5)),
    }
    return inputs, generator.integers(2, size=samples)


class Clicks(DataSource):
    """The same for every run."""

    def facts(self, global_batch_size: int) -> Facts:
        shape = {"dense": (3,), "ids": (4,), "bag": (5,)}
        train, val = self.config["train_samples"], self.config["val_samples"]
        return Facts("clicks", "tiny", train, val, shape, 2, task="binary", integers=("ids", "bag"))

    def open(self, facts: Facts) -> Splits:
        def split(samples: int, seed: int) -> Any:
            inputs, labels = clicks(samples, seed)
            return ArrayDataset({k: torch.from_numpy(v) for k, v in inputs.items()}, torch.from_numpy(labels))

        return Splits(split(facts.train_samples, 1), split(facts.val_samples, 2))


class TimedClicks(Clicks):
    """As Clicks, and each sample has a time, 100 after the one before."""

    def facts(self, global_batch_size: int) -> Facts:
        facts = super().facts(global_batch_size)
        assert isinstance(facts.shape, dict)
        return replace(facts, shape={**facts.shape, "time": ()}, integers=(*facts.integers, "time"))

    def open(self, facts: Facts) -> Splits:
        splits = super().open(facts)
        for data in (splits.train, splits.val):
            data.inputs["time"] = 100 * torch.arange(len(data))
        return splits


class Tabled(nn.Module):
    """A RowEmbedding, a plain sparse Embedding that is looked up twice (once by ids made in the model), a bag, a
    layer."""

    def __init__(self, dim: int = 3, hidden: int = 5) -> None:
        super().__init__()
        self.rows = RowEmbedding(ROWS, dim, "normal", 0.3)
        self.plain = nn.Embedding(ROWS, dim, padding_idx=0, sparse=True)
        self.bag = nn.EmbeddingBag(ROWS, dim, mode="mean", sparse=True)
        self.hidden = nn.Linear(3 + 4 * dim + 4 * dim + dim + dim, hidden)
        self.out = nn.Linear(hidden, 1)

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        ids = inputs["ids"]
        parts = [
            inputs["dense"],
            self.rows(ids).flatten(1),
            self.plain(ids).flatten(1),
            self.plain((ids[:, 0] + 7) % ROWS),
            self.bag(inputs["bag"]),
        ]
        return self.out(torch.tanh(self.hidden(torch.cat(parts, 1)))).squeeze(1)
