"""Mixup and CutMix blend images and labels by the same share; samplers that use samples more than once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.augment.mixing import Mixing
from trainer.data.epoch_order import EpochOrder
from trainer.data.sample_orders import ClassBalanced, RepeatedAugmentation
from trainer.data.sampler import AllWorkersBatches, DistributedBatchSampler

IMAGES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (8, 3, 16, 12), np.uint8))
LABELS = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])


@pytest.mark.parametrize("epoch", range(12))
def test_mixup_blends_images_and_labels_by_one_share(epoch: int) -> None:
    images, labels = Mixing(0.5, 0.0, 1.0, 5)(IMAGES, LABELS, (0, epoch), np.arange(8))
    shares = torch.nn.functional.one_hot(LABELS, 5).float()
    partners = shares.roll(1, 0)
    share = labels[0, 0].item()
    torch.testing.assert_close(labels, share * shares + (1 - share) * partners)
    expected = share * IMAGES.double() + (1 - share) * IMAGES.roll(1, 0).double()
    assert (images.double() - expected).abs().max() <= 0.5 + 1e-4


@pytest.mark.parametrize("epoch", range(12))
def test_cutmix_shares_are_the_shares_of_pixels(epoch: int) -> None:
    images, labels = Mixing(0.0, 1.0, 1.0, 5)(IMAGES, LABELS, (0, epoch), np.arange(8))
    partners = IMAGES.roll(1, 0)
    for n in range(8):
        own = (images[n] == IMAGES[n]).all(0)
        assert ((images[n] == partners[n]).all(0) | own).all()
        assert labels[n, LABELS[n]].item() == pytest.approx(own.double().mean().item(), abs=0.02)
    assert torch.allclose(labels.sum(1), torch.ones(8))


def test_both_are_used_in_turn_by_lot_and_the_share_is_beta() -> None:
    mixing, kinds = Mixing(5.0, 1.0, 0.8, 5), Counter()
    for epoch in range(600):
        images, labels = mixing(IMAGES, LABELS, (1, epoch), np.arange(8))
        if torch.equal(labels, torch.nn.functional.one_hot(LABELS, 5).float()) and torch.equal(images, IMAGES):
            kinds["none"] += 1
        elif ((images == IMAGES) | (images == IMAGES.roll(1, 0))).all():
            kinds["cutmix"] += 1
        else:
            kinds["mixup"] += 1
    assert 90 < kinds["none"] < 190 and abs(kinds["cutmix"] - kinds["mixup"]) < 100, kinds
    only = Mixing(0.4, 0.0, 1.0, 5)
    shares = [only(IMAGES, LABELS, (1, e), np.arange(8))[1][0, 0].item() for e in range(2000)]
    assert np.var(shares) == pytest.approx(0.25 / (2 * 0.4 + 1), rel=0.08), "variance of Beta(0.4, 0.4)"


def test_mixing_depends_on_the_batch_alone() -> None:
    mixing = Mixing(0.2, 1.0, 1.0, 5)
    one = mixing(IMAGES, LABELS, (1, 7), np.arange(8))
    np.random.default_rng().random(5)
    again = mixing(IMAGES, LABELS, (1, 7), np.arange(8))
    assert torch.equal(one[0], again[0]) and torch.equal(one[1], again[1])
    assert not torch.equal(one[1], mixing(IMAGES, LABELS, (1, 8), np.arange(8))[1])


@settings(max_examples=25, deadline=None)
@given(counts=st.lists(st.integers(1, 40), min_size=2, max_size=8), epoch=st.integers(0, 5))
def test_balanced_order_has_every_class_equally_often(counts: list[int], epoch: int) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    order = EpochOrder(len(labels), 3, ClassBalanced(), labels)(epoch)
    assert len(order) == len(labels)
    drawn = np.bincount(labels[order % len(labels)], minlength=len(counts))
    assert drawn.max() - drawn.min() <= 1
    uses = np.bincount(order % len(labels), minlength=len(labels))
    for label in range(len(counts)):
        ours = uses[labels == label]
        assert ours.max() - ours.min() <= 1, "a class's samples take turns"
    assert len(np.unique(order)) == len(order), "each use has an address of its own"


@settings(max_examples=25, deadline=None)
@given(samples=st.integers(1, 200), repeats=st.integers(1, 5), epoch=st.integers(0, 3))
def test_repeated_order_has_copies_side_by_side(samples: int, repeats: int, epoch: int) -> None:
    order = EpochOrder(samples, 1, RepeatedAugmentation(repeats))(epoch)
    assert len(order) == samples and len(np.unique(order)) == samples
    for start in range(0, samples, repeats):
        copies = order[start : start + repeats]
        assert len(set((copies % samples).tolist())) == 1
        assert (copies // samples).tolist() == list(range(len(copies)))


def test_repeated_copies_go_to_different_workers() -> None:
    samplers = [
        DistributedBatchSampler(60, 10, r, 3, order=EpochOrder(60, 0, RepeatedAugmentation(3))) for r in range(3)
    ]
    first = [set((next(s.arrays()) % 60).tolist()) for s in samplers]
    assert first[0] == first[1] == first[2]


@settings(max_examples=25, deadline=None)
@given(
    samples=st.integers(1, 60),
    size=st.integers(1, 7),
    workers=st.integers(1, 4),
    pad=st.booleans(),
    drop_last=st.booleans(),
)
def test_everybodys_batches_are_those_of_each_worker(
    samples: int, size: int, workers: int, pad: bool, drop_last: bool
) -> None:
    samplers = [DistributedBatchSampler(samples, size, r, workers, 5, True, drop_last, pad) for r in range(workers)]
    each = [[a.tolist() for a in s.arrays()] for s in samplers]
    everybody = [a.tolist() for a in AllWorkersBatches(samplers[0]).arrays()]
    assert everybody == [each[rank][batch] for batch in range(len(samplers[0])) for rank in range(workers)]
    assert len(AllWorkersBatches(samplers[0])) == len(everybody)
