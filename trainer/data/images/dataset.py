"""The data set of a split of images: batches of uint8 images, decoded from files or read from the decoded cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from trainer.data.augment.draws import Draw
from trainer.data.images.cache import Decoded
from trainer.data.images.decode import decode
from trainer.data.images.header import BadImage
from trainer.data.images.listing import Listing
from trainer.data.tables.read import read_columns
from trainer.errors import RunFailed, UserError, why
from trainer.visible import shortened


class View(Protocol):
    """Protocol of the views in :mod:`trainer.data.augment.views`."""

    def __call__(
        self, images: Iterator[torch.Tensor], sizes: np.ndarray, draw: Draw, addresses: np.ndarray
    ) -> torch.Tensor:
        """(images (3, H, W), their sizes (N, 2), (seed, epoch), addresses (N,)) -> (N, 3, S, S) uint8."""
        ...

    def on(self, device: torch.device) -> View:
        """The same view of images that lie on a device."""
        ...


class ImageSet(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The data set of a split of images: images (3, S, S) uint8 and the labels of a listing.

    Args:
        view: makes a batch of equal size of images of any size.
        cache: folder of the decoded images; None: they are decoded each time.
    """

    def __init__(self, listing: Listing, view: View, cache: Path | None = None) -> None:
        self.listing = listing
        self.view = view
        self.cache = cache
        self.labels = torch.from_numpy(listing.labels)
        self._decoded: Decoded | None = None

    def __len__(self) -> int:
        return len(self.listing)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = self.augmented((0, 0), np.array([index]))
        return images[0], labels[0]

    def sample_name(self, number: int) -> str:
        """The name of the image with this index, relative to the folder of the data."""
        return self.listing.short_name(number)

    def column(self, name: str) -> list[Any]:
        """(N,) values of a column of the table that the images come from.

        Raises:
            UserError: they come from no table, or it has no such column.
        """
        if (table := self.listing.table) is None:
            raise UserError(f"column {name}", "the training data come from no table", "data=table")
        values = read_columns(table.path, [name], table.key)[name]
        return [values[row] for row in table.rows.tolist()]

    def image(self, number: int) -> torch.Tensor:
        """Return one whole decoded image (3, H, W), before any crop.

        Raises:
            RunFailed: it cannot be read or decoded; with its name.
        """
        if self.cache is not None:
            if self._decoded is None:  # mapped by the process that reads, once
                self._decoded = Decoded(self.cache)
            return self._decoded(int(self.listing.number[number]))
        try:
            return decode(self.listing.read(number), self.listing.limits)
        except (BadImage, OSError) as error:
            raise unreadable(self.listing, number, error) from error

    def augmented(self, draw: Draw, addresses: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the augmented batch of the samples at these addresses: (N, 3, S, S) uint8 and labels (N,).

        Args:
            draw: (seed, epoch), from which the augmentation follows.
            addresses: numbers of samples, plus the set's length for each earlier use in the same epoch.
        """
        numbers = addresses % len(self)
        images = [self.image(number) for number in numbers.tolist()]
        sizes = np.array([image.shape[-2:] for image in images], np.int64).reshape(-1, 2)
        return self.view(iter(images), sizes, draw, addresses), self.labels[torch.from_numpy(numbers)]

    def resident(self, device: torch.device) -> ImageSet:
        """This data set with all its decoded images on a device, where batches are cut from them (data.cache=device).

        Labels stay on the CPU.
        """
        assert self.cache is not None
        there = ImageSet(self.listing, self.view.on(device), self.cache)
        there._decoded = Decoded(self.cache, device)
        return there

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_decoded": None}


def unreadable(listing: Listing, number: int, error: Exception) -> RunFailed:
    """The error for an image that cannot be read or decoded, with its name."""
    return RunFailed(
        f"{shortened(listing.names[number])} cannot be read: {why(error)}. data.verify=true finds all such images "
        "before the training, and data.on_bad=skip leaves them out."
    )
