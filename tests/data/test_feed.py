"""The feed: samples reach the loop in the planned groups, weighted, placed, and the same whoever reads them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from tests.pace import wait_for
from tests.strategies.tiny import Augmented
from trainer.data.arrays.tensors import ArrayDataset
from trainer.data.feed import Feed
from trainer.data.leased_blocks import LeasedBatches, LeasedRows
from trainer.data.placement import Placement
from trainer.data.reader import Addresses, Reader, Reading
from trainer.data.sampler import DistributedBatchSampler, EvaluationSampler
from trainer.data.source import Splits
from trainer.strategies.contract import Lease

CPU = torch.device("cpu")
Make = Callable[..., Feed]


def numbered(samples: int) -> ArrayDataset:
    """Inputs (N, 1) and labels (N,) that are the sample's number."""
    return ArrayDataset(torch.arange(float(samples)).unsqueeze(1), torch.arange(samples))


def feed(
    train: Dataset[Any],
    val: Dataset[Any],
    batch: int = 4,
    rank: int = 0,
    world: int = 1,
    pad: bool = True,
    drop_last: bool = False,
    **options: Any,
) -> Feed:
    splits = Splits(train, val)
    return Feed(
        splits,
        DistributedBatchSampler(len(train), batch, rank, world, drop_last=drop_last, pad=pad),
        EvaluationSampler(len(val), batch, rank, world),
        Placement(splits, CPU, torch.float64, False),
        reading=Reading(**{k: options.pop(k) for k in list(options) if k in Reading.__dataclass_fields__}),
        **options,
    )


@pytest.fixture
def make() -> Iterator[Make]:
    """Feeds whose reading processes end with the test."""
    made: list[Feed] = []

    def one(*arguments: Any, **options: Any) -> Feed:
        made.append(feed(*arguments, **options))
        return made[-1]

    yield one
    for each in made:
        each.close()


@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 7),
    world=st.integers(1, 5),
    merge=st.integers(1, 4),
    average=st.booleans(),
)
def test_shares_and_samples_make_every_sample_count_alike_in_its_update(
    samples: int, batch: int, world: int, merge: int, average: bool
) -> None:
    """Summing (worker's samples / all) * share * (1 / batch) over everything gives each sample 1 / all, or merged times
    that."""
    crew = [
        feed(numbered(samples), numbered(1), batch, rank, world, pad=False, merge=merge, average=average)
        for rank in range(world)
    ]
    seen: set[int] = set()
    for parts in zip(*(each.updates(0) for each in crew), strict=True):
        together = sum(count for count, _ in parts)
        weights: dict[int, float] = {}
        for count, batches in parts:
            listed = list(batches)
            assert sum(b.samples for b in listed) == count
            assert [b.last for b in listed] == [False] * (len(listed) - 1) + [True]
            for b in listed:
                for label in b.labels.tolist() if b.samples else ():
                    assert label not in weights
                    weights[label] = count / together * b.share / b.samples
                assert b.samples or b.share == 0.0
        assert len(weights) == together
        times = 1 if average else len(listed)
        assert all(weight == pytest.approx(times / together) for weight in weights.values())
        assert not seen & set(weights)
        seen |= set(weights)
    assert seen == set(range(samples))


@given(samples=st.integers(0, 60), batch=st.integers(1, 7), world=st.integers(1, 5))
def test_evaluation_counts_every_sample_exactly_once(samples: int, batch: int, world: int) -> None:
    labels = [
        label
        for rank in range(world)
        for numbers, b in feed(numbered(8), numbered(samples), batch, rank, world).evaluation(rank, world)
        for number, label in zip(numbers.tolist(), b.labels.tolist(), strict=True)
        if b.samples == len(b.labels) == len(b.inputs) and number == label
    ]
    assert sorted(labels) == list(range(samples))


def test_limits_end_epochs_and_evaluations_early(make: Make) -> None:
    limited = make(numbered(40), numbered(40), limit_train=3, limit_val=2, merge=2)
    assert [count for count, batches in limited.updates(0) if list(batches)] == [8, 4]
    assert [b.samples for _, b in limited.evaluation(0, 1)] == [4, 4]
    assert len(list(make(numbered(8), numbered(8), limit_train=30).updates(0))) == 2


def test_every_epoch_has_its_own_order_in_every_reader(make: Make) -> None:
    for readers in (0, 1):
        one = make(numbered(40), numbered(4), num_workers=readers)
        orders = [[label for _, bs in one.updates(e) for b in bs for label in b.labels.tolist()] for e in (0, 1, 0)]
        assert orders[0] == orders[2] != orders[1]
        assert sorted(orders[1]) == list(range(40))


class Noting(ArrayDataset):
    """Counts the batches that were read, in all processes."""

    def __init__(self, samples: int) -> None:
        super().__init__(torch.zeros(samples, 1), torch.arange(samples))
        self.read = torch.zeros(1).share_memory_()

    def batch(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        self.read += 1
        return super().batch(indices)


@pytest.mark.parametrize("prefetch", [1, 3])
def test_a_reading_process_keeps_so_many_batches_ready(make: Make, prefetch: int) -> None:
    data = Noting(80)
    one = make(data, numbered(4), num_workers=1, prefetch=prefetch)
    assert one.reader is not None
    batches = one.reader.read(Addresses(one.sampler))
    next(batches)
    wait_for(lambda: data.read >= 1 + prefetch, 10, "batches are read ahead")
    time.sleep(0.1)
    assert data.read == 1 + prefetch, "the one that was taken, and those ready"


def augmented(make: Make, readers: int, epoch: int, **options: Any) -> dict[int, torch.Tensor]:
    """Samples of an epoch by their label, through an augmentation that draws from all generators."""
    data = Augmented(torch.arange(24 * 8.0).view(24, 1, 1, 8).expand(24, 1, 8, 8), torch.arange(24))
    one = make(data, numbered(4), num_workers=readers, **options)
    batches = [b for _, bs in one.updates(epoch) for b in bs]
    return {label: image for b in batches for label, image in zip(b.labels.tolist(), b.inputs, strict=True)}


def test_augmentation_depends_on_seed_epoch_and_sample_alone(make: Make) -> None:
    torch.manual_seed(1)
    truth = augmented(make, 0, 3, seed=7)
    for readers, batch in ((0, 5), (1, 4), (2, 4), (2, 3)):
        torch.manual_seed(readers)
        np.random.seed(readers)
        other = augmented(make, readers, 3, seed=7, batch=batch)
        assert all(torch.equal(other[label], image) for label, image in truth.items())
    for other in (augmented(make, 0, 4, seed=7), augmented(make, 0, 3, seed=8)):
        assert not any(torch.equal(other[label], image) for label, image in truth.items())
    assert len({float(image[0, 0].min() - 8 * label) for label, image in truth.items()}) == 24


def test_reading_leaves_the_generators_of_the_training_alone(make: Make) -> None:
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = float(torch.rand(())), random.random(), np.random.rand()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    assert augmented(make, 0, 0)
    assert (float(torch.rand(())), random.random(), np.random.rand()) == expected


class Blocks:
    """Rows read block by block: the second block has none."""

    def blocks(self) -> int:
        return 3

    def read_chunks(self, block: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if block != 1:
            yield torch.arange(5.0).unsqueeze(1) + 10 * block, torch.arange(5) + 10 * block


def test_leases_without_a_batch_are_given_back(make: Make) -> None:
    said: list[str] = []

    def hand(name: str, *leases: tuple[int, int]) -> Any:
        return lambda epoch, blocks: iter(Lease(b, s, partial(said.append, f"{name} {b}")) for b, s in leases)

    data = numbered(24)
    sampler = DistributedBatchSampler(24, 4, shuffle=False)

    maps = LeasedBatches(Reader(data, Reading()), sampler, 3, None, 1, None, hand("map", (0, 3), (1, 2)))
    stream = LeasedRows(Blocks(), 2, 0, False, hand("stream", (0, 0), (1, 0), (2, 2)))
    seen = {}
    for name, work in (("map", maps), ("stream", stream)):
        feed = make(data, numbered(4), work=work)
        seen[name] = [(b.work, b.labels.tolist()) for _, update in feed.updates(0) for b in update]
    assert said == ["map 0", "stream 1"]
    assert seen["map"] == [((0, 1, 2, True), [20, 21, 22, 23])]
    assert seen["stream"] == [
        ((0, 0, 0, False), [0, 1]),
        ((0, 0, 1, False), [2, 3]),
        ((0, 0, 2, True), [4]),
        ((0, 2, 2, True), [24]),
    ]


def test_bytes_become_normalised_floats_on_the_device() -> None:
    images = torch.arange(0, 240, 10, dtype=torch.uint8).view(1, 3, 2, 4)
    place = Placement(Splits(numbered(1), numbered(1), (0.5, 0.4, 0.3), (0.1, 0.2, 0.4)), CPU, torch.float64, True)
    placed, labels = place(images, torch.tensor([3]))
    mean, std = (np.array(v).reshape(3, 1, 1) for v in ((0.5, 0.4, 0.3), (0.1, 0.2, 0.4)))
    np.testing.assert_allclose(placed.numpy(), (images.numpy() / 255 - mean) / std, rtol=1e-14)
    assert placed.dtype == torch.float64 and placed.is_contiguous(memory_format=torch.channels_last)
    assert labels.tolist() == [3]


def test_integers_that_are_no_bytes_stay_as_they_are() -> None:
    tokens = torch.tensor([[1, 2, 3]])
    placed, _ = Placement(Splits(numbered(1), numbered(1)), CPU, torch.float32, True)(tokens, torch.tensor([0]))
    assert placed.dtype == torch.int64 and torch.equal(placed, tokens)


class Slow(ArrayDataset):
    """A batch takes 20 ms."""

    def batch(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.02)
        return super().batch(indices)


def test_waiting_for_data_is_measured_and_computing_is_not(make: Make) -> None:
    slow = make(Slow(torch.zeros(40, 1), torch.arange(40)), numbered(4))
    start = time.perf_counter()
    for _, batches in slow.updates(0):
        for _ in batches:
            time.sleep(0.01)
    passed = time.perf_counter() - start
    assert 10 * 0.02 <= slow.waited <= passed - 10 * 0.01
