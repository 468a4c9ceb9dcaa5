"""A data source of points whose classes have names: a sample belongs to its name, whatever the number of that class
is."""

from __future__ import annotations

from typing import Any

from trainer.data.source import DataSource, Facts, Splits

ALL = ["daisy", "iris", "pansy", "rose"]


def points(names: list[str], each: int, seed: int) -> tuple[Any, list[str]]:
    """Inputs (N, 1, 8, 8) and the name of each, in the order of ``ALL``, of these names alone."""
    import numpy as np

    draw, inputs, called = np.random.default_rng(seed), [], []
    for number, name in enumerate(ALL):
        drawn = draw.normal(size=(each, 1, 8, 8)) + 0.3 * number
        if name in names:
            inputs.append(drawn)
            called += [name] * each
    return np.concatenate(inputs).astype(np.float32), called


class Named(DataSource):
    """``+data.names=[...]``: the classes in the order of their labels; ``+data.silent=true``: it does not name them."""

    @property
    def names(self) -> list[str]:
        return list(self.config["names"])

    def facts(self, global_batch_size: int) -> Facts:
        classes = len(self.names)
        return Facts(f"points of {classes}", "points", 8 * classes, 10 * classes, (1, 8, 8), classes)

    def class_names(self, facts: Facts) -> list[str]:
        return [] if self.config.get("silent") else self.names

    def open(self, facts: Facts) -> Splits:
        import torch
        from torch.utils.data import TensorDataset

        sets = []
        for each, seed in ((8, 0), (10, 1)):
            inputs, called = points(self.names, each, seed)
            labels = torch.tensor([self.names.index(name) for name in called])
            sets.append(TensorDataset(torch.from_numpy(inputs), labels))
        return Splits(*sets)
