"""Random boxes in images, for crops and erased patches as torchvision draws them, for many images at once."""

from __future__ import annotations

import math

import numpy as np

TRIES = 10
NUMBERS = 4 * TRIES
"""Random numbers that one image's box takes."""


def random_crops(
    numbers: np.ndarray, heights: np.ndarray, widths: np.ndarray, scale: tuple[float, float], ratio: tuple[float, float]
) -> np.ndarray:
    """Draw the boxes of RandomResizedCrop (Szegedy et al., 2015): random area, and aspect ratio on a log scale.

    Ten tries; where none fits, the largest centred box whose ratio is within bounds.

    Args:
        numbers: (N, NUMBERS) in [0, 1).
        heights, widths: (N,) of the images.

    Returns:
        (N, 4) int64: top, left, height, width.
    """
    boxes = _tries(numbers, heights, widths, scale, ratio)
    height, width = heights[:, None], widths[:, None]
    fits = (boxes[..., 2] > 0) & (boxes[..., 3] > 0) & (boxes[..., 2] <= height) & (boxes[..., 3] <= width)
    chosen = np.take_along_axis(boxes, fits.argmax(1)[:, None, None], 1)[:, 0]
    return np.where(fits.max(1)[:, None], chosen, _centred(heights, widths, ratio)).astype(np.int64)


def random_patches(
    numbers: np.ndarray, heights: np.ndarray, widths: np.ndarray, scale: tuple[float, float], ratio: tuple[float, float]
) -> np.ndarray:
    """Draw the boxes of random erasing (Zhong et al., 2017), smaller than the image; of size 0 if ten tries do not fit.

    Arguments and result as of ``random_crops``.
    """
    boxes = _tries(numbers, heights, widths, scale, ratio)
    fits = (boxes[..., 2] < heights[:, None]) & (boxes[..., 3] < widths[:, None])
    chosen = np.take_along_axis(boxes, fits.argmax(1)[:, None, None], 1)[:, 0]
    patches: np.ndarray = (chosen * fits.max(1)[:, None]).astype(np.int64)
    return patches


def _tries(
    numbers: np.ndarray, heights: np.ndarray, widths: np.ndarray, scale: tuple[float, float], ratio: tuple[float, float]
) -> np.ndarray:
    """(N, TRIES, 4) boxes; those that are larger than the image begin at 0."""
    numbers = numbers.reshape(len(numbers), TRIES, 4)
    area = (heights * widths)[:, None] * (scale[0] + (scale[1] - scale[0]) * numbers[..., 0])
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = np.exp(low + (high - low) * numbers[..., 1])
    width, height = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    top = np.floor(numbers[..., 2] * np.maximum(heights[:, None] - height + 1, 1))
    left = np.floor(numbers[..., 3] * np.maximum(widths[:, None] - width + 1, 1))
    return np.stack([top, left, height, width], 2)


def _centred(heights: np.ndarray, widths: np.ndarray, ratio: tuple[float, float]) -> np.ndarray:
    aspect = widths / heights
    width = np.where(aspect > ratio[1], np.rint(heights * ratio[1]), widths)
    height = np.where(aspect < ratio[0], np.rint(widths / ratio[0]), heights)
    return np.stack([(heights - height) // 2, (widths - width) // 2, height, width], 1)
