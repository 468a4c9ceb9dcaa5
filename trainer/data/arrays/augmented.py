"""A training set of small images in memory, with the usual augmentation, a whole batch at a time."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

from trainer.data.augment.draws import Draw, uniform
from trainer.data.augment.views import COUNT, Augmentation
from trainer.host.transfers import on_its_way


class AugmentedArrays(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A training set of images (N, C, H, W) uint8 and labels (N,) in memory, augmented a whole batch at a time.

    Args:
        pad_crop: zero pixels around an image, from which a window of the image's size is cut.
        augmentation: the changes after that.
    """

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, pad_crop: int, augmentation: Augmentation) -> None:
        self.images = images
        self.labels = labels
        self.pad_crop = pad_crop
        self.augmentation = augmentation

    def resident(self, device: torch.device) -> AugmentedArrays:
        """This data set with its images on a device, where batches are cut from them. Labels stay on the CPU."""
        return DeviceArrays(self.images.to(device), self.labels, self.pad_crop, self.augmentation.on(device))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = self.augmented((0, 0), np.array([index]))
        return images[0], labels[0]

    def augmented(self, draw: Draw, addresses: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the augmented batch of the samples at these addresses: images (N, C, H, W) uint8 and labels (N,).

        Args:
            draw: (seed, epoch), from which the augmentation follows.
            addresses: numbers of samples, plus the set's length for each earlier use in the same epoch.
        """
        chosen = torch.from_numpy(addresses % len(self))
        numbers = uniform(draw, addresses, COUNT)
        images = self._images(chosen)
        if self.pad_crop:
            images = self._shifted_images(images, numbers[:, 0], numbers[:, 1])
        return self.augmentation.finish(images, numbers), self.labels[chosen]

    def _images(self, chosen: torch.Tensor) -> torch.Tensor:
        return self.images[chosen]

    def _shifted_images(self, images: torch.Tensor, down: np.ndarray, right: np.ndarray) -> torch.Tensor:
        return _shifted(images, self.pad_crop, down, right)


class DeviceArrays(AugmentedArrays):
    """Images on a device. The host does not wait for it, and no number of kernels depends on that of the images."""

    def _images(self, chosen: torch.Tensor) -> torch.Tensor:
        return self.images[on_its_way(chosen, self.images.device)]

    def _shifted_images(self, images: torch.Tensor, down: np.ndarray, right: np.ndarray) -> torch.Tensor:
        samples, _, height, width = images.shape
        top, left = _corners(self.pad_crop, down, right)
        framed = F.pad(images, (self.pad_crop,) * 4).permute(0, 2, 3, 1)
        rows = on_its_way(torch.from_numpy(top[:, None, None] + np.arange(height)[:, None]), images.device)
        columns = on_its_way(torch.from_numpy(left[:, None, None] + np.arange(width)), images.device)
        number = torch.arange(samples, device=images.device).view(-1, 1, 1)
        return framed[number, rows, columns].permute(0, 3, 1, 2)


def _shifted(images: torch.Tensor, pad: int, down: np.ndarray, right: np.ndarray) -> torch.Tensor:
    """Shift each image at random: pad it with ``pad`` zeros on each side and cut a window of its size from it.

    Args:
        images: (N, C, H, W).
        down, right: (N,).
    """
    _, _, height, width = images.shape
    framed = F.pad(images, (pad, pad, pad, pad)).numpy()
    windows = np.lib.stride_tricks.sliding_window_view(framed, (height, width), (2, 3))
    top, left = _corners(pad, down, right)
    return torch.from_numpy(np.ascontiguousarray(windows[np.arange(len(top)), :, top, left]))


def _corners(pad: int, down: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the windows begin, (N,) each, by random numbers in [0, 1)."""
    return ((2 * pad + 1) * down).astype(np.int64), ((2 * pad + 1) * right).astype(np.int64)
