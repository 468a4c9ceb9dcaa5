"""Random boxes are distributed as torchvision draws them, and lie in the image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from trainer.data.augment.boxes import NUMBERS, random_crops, random_patches
from trainer.data.augment.draws import uniform

MANY = 40_000


def numbers(count: int, seed: int = 0) -> np.ndarray:
    return uniform((seed, 0), np.arange(count), NUMBERS)


@pytest.mark.parametrize("size", [(300, 500), (500, 300), (64, 64), (20, 400)])
@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.35, 1.0)])
def test_crops_are_distributed_as_torchvisions(size: tuple[int, int], scale: tuple[float, float]) -> None:
    torch.manual_seed(0)
    image, theirs = torch.zeros(3, *size, dtype=torch.uint8), v2.RandomResizedCrop(32, scale)
    truth = np.array([list(theirs.make_params([image]).values()) for _ in range(4000)])
    ours = random_crops(numbers(MANY), np.full(MANY, size[0]), np.full(MANY, size[1]), scale, (3 / 4, 4 / 3))
    error = 4 * truth.std(0) / 4000**0.5 + 0.02
    assert (abs(ours.mean(0) - truth.mean(0)) < error).all(), (ours.mean(0), truth.mean(0))
    assert np.allclose(ours.std(0), truth.std(0), rtol=0.06, atol=0.5)
    assert (ours[:, :2] >= 0).all() and (ours[:, 2:] > 0).all()
    assert (ours[:, 0] + ours[:, 2] <= size[0]).all() and (ours[:, 1] + ours[:, 3] <= size[1]).all()


def test_erased_patches_are_distributed_as_torchvisions() -> None:
    torch.manual_seed(0)
    theirs, found = v2.RandomErasing(1.0, value=[1.0]), []
    for _ in range(3000):
        erased = theirs(torch.zeros(1, 48, 64))[0]
        rows, columns = torch.nonzero(erased.sum(1)), torch.nonzero(erased.sum(0))
        if len(rows):
            found.append([rows.min(), columns.min(), len(rows), len(columns)])
    truth = np.array(found, float)
    ours = random_patches(numbers(MANY), np.full(MANY, 48), np.full(MANY, 64), (0.02, 0.33), (0.3, 3.3))
    ours = ours[ours[:, 2] > 0]
    assert (abs(ours.mean(0) - truth.mean(0)) < 4 * truth.std(0) / len(truth) ** 0.5 + 0.1).all()


def test_numbers_are_even_and_independent() -> None:
    drawn = uniform((3, 1), np.arange(200_000), 4)
    assert (abs(drawn.mean(0) - 0.5) < 0.003).all() and (abs(drawn.var(0) - 1 / 12) < 0.001).all()
    assert abs(np.corrcoef(drawn.T) - np.eye(4)).max() < 0.01
    assert abs(np.corrcoef(drawn[:-1, 0], drawn[1:, 0])[0, 1]) < 0.01
    for other in (uniform((4, 1), np.arange(200_000), 4), uniform((3, 2), np.arange(200_000), 4)):
        assert abs(np.corrcoef(drawn[:, 0], other[:, 0])[0, 1]) < 0.01


def test_numbers_belong_to_the_sample_and_not_to_the_batch() -> None:
    whole = uniform((0, 5), np.arange(100), 7)
    assert np.array_equal(uniform((0, 5), np.array([42, 7]), 7), whole[[42, 7]])
