"""Training and validation views of images: crops, flips, RandAugment, erasing; all on uint8, on the CPU or a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torchvision.transforms import v2

from trainer.config.schema import AugmentedData, ImagesData
from trainer.data.augment.boxes import NUMBERS, random_crops, random_patches
from trainer.data.augment.draws import Draw, uniform
from trainer.data.augment.global_generators import own_randomness
from trainer.data.augment.transforms import Transforms
from trainer.host.transfers import on_its_way

ERASED, ERASED_RATIO = (0.02, 1 / 3), (0.3, 3.3)
"""Share of the area and aspect ratio of an erased patch, as in the paper and in torchvision."""

LONGEST = 20
"""Longest side in multiples of the shorter one; a longer image is cut before it is resized."""

FIRST, FLIP, ERASE, POLICY = slice(0, NUMBERS), NUMBERS, NUMBERS + 1, NUMBERS + 2
PATCH = slice(NUMBERS + 3, 2 * NUMBERS + 3)
TRANSFORMS = 2 * NUMBERS + 3
COUNT = 2 * NUMBERS + 4


def _policy_of(name: str, ops: int, magnitude: int, fill: list[int]) -> Callable[[Any], Any] | None:
    """Return torchvision's augmentation policy of that name: RandAugment, TrivialAugment or AutoAugment.
    After Cubuk et al. (2020) and Mueller & Hutter (2021)."""
    if name == "randaugment":
        return v2.RandAugment(ops, magnitude, fill=fill)  # type: ignore[no-any-return]
    if name == "trivialaugment":
        return v2.TrivialAugmentWide(fill=fill)  # type: ignore[no-any-return]
    if name == "autoaugment":
        return v2.AutoAugment(fill=fill)  # type: ignore[no-any-return]
    return None


@dataclass
class Augmentation:
    """The random changes that all kinds of training images share: flip, policy, data.transforms, erasing.

    Attributes:
        flip: probability of a horizontal flip.
        policy: an image (C, H, W) to another of the same shape, by torch's generator; None: none.
        transforms: the user's own, after it.
        erasing: probability of an erased patch, which becomes the channels' means.
        mean: (C,) uint8.
    """

    flip: float
    policy: Callable[[Any], Any] | None
    erasing: float
    mean: torch.Tensor
    transforms: Transforms | None = None

    @staticmethod
    def of(options: AugmentedData, mean: tuple[float, ...]) -> Augmentation:
        """Make the augmentation that a data source's options ask for."""
        fill = [round(255 * m) for m in mean]
        policy = _policy_of(options.augment, options.randaugment_ops, options.randaugment_magnitude, fill)
        nodes = options.transforms if isinstance(options, ImagesData) else []
        transforms = Transforms(nodes) if nodes else None
        return Augmentation(options.flip, policy, options.erasing, torch.tensor(fill, dtype=torch.uint8), transforms)

    def finish(self, images: torch.Tensor, numbers: np.ndarray) -> torch.Tensor:
        """Apply flip, policy, data.transforms and erasing to images, in place where possible.

        Args:
            images: (N, C, H, W) uint8, already cropped.
            numbers: (N, COUNT).
        """
        images = self.flipped(images, numbers[:, FLIP] < self.flip)
        if self.policy is not None:
            with own_randomness():
                for image, number in zip(images, numbers[:, POLICY], strict=True):
                    torch.default_generator.manual_seed(int(number * 2**53))
                    image.copy_(self.policy(image))
        if self.transforms is not None:
            with own_randomness():
                for image, number in zip(images, numbers[:, TRANSFORMS], strict=True):
                    image.copy_(self.transforms(image, float(number)))
        if self.erasing:
            self._erase(images, numbers)
        return images

    def flipped(self, images: torch.Tensor, chosen: np.ndarray) -> torch.Tensor:
        """Mirror the images (N, C, H, W) that are chosen (N,) bool, in place where possible."""
        for sample in np.flatnonzero(chosen):  # one by one: a tenth of the time of an index
            images[sample] = images[sample].flip(-1)
        return images

    def on(self, device: torch.device) -> DeviceAugmentation:
        """The same changes of images that lie on a device, without a policy and data.transforms."""
        assert self.policy is None and self.transforms is None, "they change images on the CPU; the plan refuses them"
        return DeviceAugmentation(self.flip, None, self.erasing, self.mean.to(device))

    def _erase(self, images: torch.Tensor, numbers: np.ndarray) -> None:
        chosen = np.flatnonzero(numbers[:, ERASE] < self.erasing)
        heights, widths = (np.full(len(chosen), side) for side in images.shape[-2:])
        for sample, (top, left, height, width) in zip(
            chosen, random_patches(numbers[chosen, PATCH], heights, widths, ERASED, ERASED_RATIO), strict=True
        ):
            images[sample, :, top : top + height, left : left + width] = self.mean[:, None, None]


class DeviceAugmentation(Augmentation):
    """An Augmentation of images on a device: a batch is mirrored by as many kernels for any number of images."""

    def flipped(self, images: torch.Tensor, chosen: np.ndarray) -> torch.Tensor:
        """Mirror the images (N, C, H, W) that are chosen (N,) bool. The host does not wait for the device."""
        which = on_its_way(torch.from_numpy(chosen), images.device)
        return torch.where(which.view(-1, 1, 1, 1), images.flip(-1), images)


def resized(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Resize an image to (C, height, width) uint8, bilinear with antialiasing as in torchvision.
    It is fastest for an image that lies in memory as (H, W, C)."""
    if image.shape[-2:] == (height, width):
        return image
    batch = image.permute(1, 2, 0)[None].permute(0, 3, 1, 2)  # image[None] is taken for contiguous, which is slower
    return F.interpolate(batch, (height, width), mode="bilinear", antialias=True)[0]


def resized_in_float(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Resize as ``resized`` does, for GPUs, where torch resizes no uint8: (C, height, width) float32, at most 1 apart
    when it is rounded."""
    return resized(image.float(), height, width)


Resize = Callable[[torch.Tensor, int, int], torch.Tensor]
"""``resized``, or ``resized_in_float`` on a GPU."""


def resize_on(device: torch.device) -> Resize:
    """The Resize of images that lie on a device."""
    return resized if device.type == "cpu" else resized_in_float


@dataclass
class TrainView:
    """The training view of an image: a random resized crop to (C, size, size), then flip, policy and erasing."""

    size: int
    scale: tuple[float, float]
    ratio: tuple[float, float]
    augmentation: Augmentation
    resize: Resize = field(default=resized)

    def __call__(
        self, images: Iterator[torch.Tensor], sizes: np.ndarray, draw: Draw, addresses: np.ndarray
    ) -> torch.Tensor:
        """(N, C, size, size) uint8 of these images (C, H, W), whose (N, 2) sizes are known."""
        numbers = uniform(draw, addresses, COUNT)
        boxes = random_crops(numbers[:, FIRST], sizes[:, 0], sizes[:, 1], self.scale, self.ratio)
        crops = [
            self.resize(image[:, top : top + height, left : left + width], self.size, self.size)
            for image, (top, left, height, width) in zip(images, boxes.tolist(), strict=True)
        ]
        return self.augmentation.finish(_stacked(crops), numbers)

    def on(self, device: torch.device) -> TrainView:
        """The same view of images that lie on a device."""
        return replace(self, augmentation=self.augmentation.on(device), resize=resize_on(device))


@dataclass
class WindowView:
    """The training view of an image: resized (shorter side), a random window (C, size, size), flip, policy, erasing."""

    shorter: int
    size: int
    augmentation: Augmentation
    resize: Resize = field(default=resized)

    def __call__(
        self, images: Iterator[torch.Tensor], sizes: np.ndarray, draw: Draw, addresses: np.ndarray
    ) -> torch.Tensor:
        """Return the views, as ``TrainView`` does; every place of the window is equally likely."""
        numbers = uniform(draw, addresses, COUNT)
        windows = []
        for image, (down, right) in zip(images, numbers[:, :2].tolist(), strict=True):
            larger = _shorter_side(image, self.shorter, self.resize)
            top, left = (
                int(n * (side - self.size + 1)) for n, side in zip((down, right), larger.shape[-2:], strict=True)
            )
            windows.append(larger[:, top : top + self.size, left : left + self.size])
        return self.augmentation.finish(_stacked(windows), numbers)

    def on(self, device: torch.device) -> WindowView:
        """The same view of images that lie on a device."""
        return replace(self, augmentation=self.augmentation.on(device), resize=resize_on(device))


@dataclass
class CentreView:
    """The validation view of an image: its shorter side resized to ``shorter``, then the centre (C, size, size)."""

    shorter: int
    size: int
    resize: Resize = field(default=resized)

    def __call__(
        self, images: Iterator[torch.Tensor], sizes: np.ndarray, draw: Draw, addresses: np.ndarray
    ) -> torch.Tensor:
        """Return the views, as ``TrainView`` does, without randomness."""
        return _stacked([self.one(image) for image in images])

    def one(self, image: torch.Tensor) -> torch.Tensor:
        """Return the centre view (C, size, size) of one image (C, H, W) uint8."""
        return v2.functional.center_crop(_shorter_side(image, self.shorter, self.resize), [self.size, self.size])  # type: ignore[no-any-return]

    def on(self, device: torch.device) -> CentreView:
        """The same view of images that lie on a device."""
        return replace(self, resize=resize_on(device))


def _shorter_side(image: torch.Tensor, shorter: int, resize: Resize) -> torch.Tensor:
    """Resize an image (C, H, W) uint8 so that its shorter side is ``shorter``.

    An image that is more than ``LONGEST`` times as long as wide is cut to that length first: a strip of 1 x 60,000
    pixels would take 12 GB.
    """
    short = min(image.shape[-2:])
    height, width = (min(side, LONGEST * short) for side in image.shape[-2:])
    if image.shape[-2:] != (height, width):
        image = v2.functional.center_crop(image, [height, width])
    return resize(image, height * shorter // short, width * shorter // short)


def _stacked(images: list[torch.Tensor]) -> torch.Tensor:
    """(N, C, H, W) uint8, which lies as (N, H, W, C) in memory like each of them, so that whole images are copied.
    Floating images are rounded."""
    whole = torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)
    return whole.round_().to(torch.uint8) if whole.is_floating_point() else whole
