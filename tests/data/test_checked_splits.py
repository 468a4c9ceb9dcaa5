"""Opened data sets that are not what the facts promise: a sentence with the source's class, before the first update."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from trainer.data.checked_splits import opened
from trainer.data.source import DataSource, Facts, Splits
from trainer.errors import RunFailed

FACTS = Facts("points", "drawn", 40, 20, (1, 8, 8), classes=3)


def points(
    samples: int, shape: tuple[int, ...] = (1, 8, 8), first: int = 0, kind: torch.dtype = torch.long
) -> TensorDataset:
    return TensorDataset(torch.zeros(samples, *shape), (torch.arange(samples) % 3 + first).to(kind))


class Own(DataSource):
    """Opens what it is given."""

    def __init__(self, train: Any, val: Any = None, **normal: Any) -> None:
        super().__init__()
        self.splits = Splits(train, points(20) if val is None else val, **normal)

    def facts(self, global_batch_size: int) -> Facts:
        return FACTS

    def open(self, facts: Facts) -> Any:
        return self.splits


class Batches:
    """A data set that is read a batch at a time."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 40


class Breaks:
    """A data set that breaks."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        raise KeyError("missing")


ONE_BAD = TensorDataset(torch.zeros(40, 1, 8, 8), torch.tensor([0] * 7 + [3] + [0] * 32))
ITEMS = [(torch.zeros(1, 8, 8), n % 3) for n in range(40)]
MISTAKES = {
    "length": (points(39), r"the training set \(TensorDataset\) has 39 samples, and its facts say 40"),
    "shape": (points(40, (8, 8)), r"\(TensorDataset\) has samples of \(8, 8\), and its facts say \(1, 8, 8\)"),
    "labels from 1": (points(40, first=1), r"has the label 3, and its facts say 3 classes: labels are from 0 to 2"),
    "one bad label": (ONE_BAD, r"has the label 3"),
    "float labels": (
        points(40, kind=torch.float32),
        r"has labels \(N\) of type torch\.float32\. Labels are whole numbers \(N,\), from 0 to 2",
    ),
    "dict items": ([{"x": x, "y": y} for x, y in ITEMS], r"\(list\): item 0 is a dict, not a pair \(input, label\)"),
    "iterator": (iter(ITEMS), r"\(list_iterator\) has no length\. A data set has __len__ and __getitem__"),
    "three": ([(*item, 0) for item in ITEMS], r"item 0 is a tuple of 3, not a pair"),
    "odd inputs": ([(object(), 0)] * 40, r"item 0 cannot be part of a batch: default_collate"),
    "batch of pairs": (
        Batches(lambda i: [ITEMS[j] for j in i]),
        r"\(Batches\): batch\(\[0\]\) is a list of 1, not a pair \(inputs, labels\)",
    ),
    "batch of arrays": (
        Batches(lambda i: (np.zeros((len(i), 1, 8, 8)), np.zeros(len(i)))),
        r"has inputs of type ndarray and labels of type ndarray\. Both must be tensors",
    ),
    "breaks": (Breaks(), r"\(Breaks\) broke in item 0, .*test_checked_splits\.py:\d+: KeyError"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_named_with_the_class(name: str) -> None:
    train, says = MISTAKES[name]
    with pytest.raises(RunFailed, match=rf"^tests\.data\.test_checked_splits\.Own.*{says}"):
        opened(Own(train), FACTS)


def test_good_data_sets_of_each_kind_pass() -> None:
    for train in (points(40), ITEMS, Batches(lambda i: (torch.zeros(len(i), 1, 8, 8), torch.zeros(len(i)).long()))):
        assert opened(Own(train, mean=(0.5,), std=(0.5,)), FACTS).train is train


class Draws(Breaks):
    """A data set that augments."""

    def __getitem__(self, index: int) -> Any:
        return torch.rand(1, 8, 8), index % 3


def test_looking_takes_nothing_of_the_runs_randomness() -> None:
    before = torch.random.get_rng_state()
    opened(Own(Draws()), FACTS)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_missing_validation_set_and_what_is_no_splits_are_named() -> None:
    source = Own(points(40))
    source.splits.val = None
    with pytest.raises(RunFailed, match=r"the validation set is None\. .*or type validation=false"):
        opened(source, FACTS)
    assert opened(source, FACTS, validates=False).val is None
    source.splits = (points(40), points(20))
    with pytest.raises(
        RunFailed, match=r"Own: open returned something of type tuple\. Return a .*Splits\(train, val\)"
    ):
        opened(source, FACTS)


def test_mean_is_one_number_for_each_channel_of_images() -> None:
    with pytest.raises(RunFailed, match="Splits has 3 numbers as mean, and the images have 1 channels"):
        opened(Own(points(40), mean=(0.1, 0.2, 0.3), std=(1.0, 1.0, 1.0)), FACTS)
    flat = Facts("points", "drawn", 40, 20, (2,), classes=3)
    with pytest.raises(RunFailed, match=r"only images \(C, H, W\) are normalised; these inputs are \(2,\)"):
        opened(Own(points(40, (2,)), points(20, (2,)), mean=(0.1,), std=(1.0,)), flat)
