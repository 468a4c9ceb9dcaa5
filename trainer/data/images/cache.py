"""The cache of decoded images: one file of uint8 pixels that all workers of a host map into memory.

A folder is named OWNER-DIGEST: OWNER follows from split and first file, DIGEST from the listing with sizes and times of
its files (:mod:`trainer.data.prepared` makes the folder). It is made in two passes, on all cores: headers give the
sizes, then the file is allocated and the pixels are filled in. The parent of a run holds the folder by a shared lock
until the run ends. Whoever makes a folder removes those of the same OWNER that nobody holds. If a folder is removed
between its making and its holding, it is made again.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from trainer.data.images.decode import decode
from trainer.data.images.header import BadImage, size_of
from trainer.data.images.listing import Listing
from trainer.data.prepared import MARKER, prepare_once
from trainer.errors import RunFailed, why
from trainer.host import hardware, in_use

PIXELS, SIZES = "pixels.bin", "sizes.npy"
AT_A_TIME = 256

OnDone = Callable[[int, int], None]
"""Called with the numbers of finished and of all images."""


class Decoded:
    """The decoded images of a listing in one memory-mapped file, each as (H, W, 3) uint8, one after the other.

    Args:
        device: the pixels are copied to it; a CPU has them in pages that processes share.
    """

    def __init__(self, folder: Path, device: torch.device | None = None) -> None:
        try:
            self.sizes = np.load(folder / SIZES)
        except (OSError, ValueError, EOFError) as error:
            raise _damaged(folder, error) from error
        self.starts = np.concatenate([[0], np.cumsum(self.sizes.prod(1) * 3)])
        try:
            there = (folder / PIXELS).stat().st_size
            if there < self.starts[-1]:  # reading what is not there would end the process
                raise ValueError(f"{PIXELS} has {there:,} bytes instead of {int(self.starts[-1]):,}")
        except (OSError, ValueError) as error:
            raise _damaged(folder, error) from error
        self.pixels = torch.from_file(str(folder / PIXELS), shared=True, size=int(self.starts[-1]), dtype=torch.uint8)
        if device is not None:
            self.pixels = self.pixels.to(device)

    def __call__(self, number: int) -> torch.Tensor:
        """Image (3, H, W) by number, without a copy."""
        height, width = self.sizes[number].tolist()
        start = int(self.starts[number])
        return self.pixels[start : start + height * width * 3].view(height, width, 3).permute(2, 0, 1)


def _damaged(folder: Path, error: Exception) -> RunFailed:
    return RunFailed(
        f"the decoded images in {folder} are gone or damaged: {why(error)}. Without that folder they are made anew."
    )


def verified(listing: Listing, on_done: OnDone) -> dict[str, str]:
    """Decode every image of a listing without keeping the pixels. Returns the broken ones: name -> reason."""
    bad: dict[str, str] = {}
    _each(listing, np.arange(len(listing)), lambda number: decode(listing.read(number), listing.limits), bad, on_done)
    return bad


def keep_decoded(listing: Listing, folder: Path, on_done: OnDone) -> dict[str, str]:
    """Decode a listing's images into the cache folder unless they are there. Returns the broken ones: name -> reason.

    This process holds the folder. Decoded images of another state of the same data, which lie beside the folder, are
    removed unless another process holds them.
    """

    def make(part: Path) -> dict[str, dict[str, str]]:
        _remove_others(folder)
        return _write(listing, part, on_done)

    noted = prepare_once(folder, make)
    while not in_use.HERE.hold(folder / MARKER):
        noted = prepare_once(folder, make)
    return dict(noted["bad"])


def _remove_others(folder: Path) -> None:
    prefix = folder.name.rpartition("-")[0]
    for other in folder.parent.iterdir():
        if other != folder and other.name.rpartition("-")[0] == prefix and other.is_dir():
            in_use.remove_unused(other, MARKER, other.with_name(f"{prefix}-{secrets.token_hex(12)}"))


def _write(listing: Listing, folder: Path, on_done: OnDone) -> dict[str, dict[str, str]]:
    bad: dict[str, str] = {}
    sizes = np.zeros((len(listing), 2), np.int64)

    def measure(number: int) -> None:
        sizes[number] = size_of(listing.read(number), listing.limits)

    _each(listing, np.arange(len(listing)), measure, bad, lambda done, total: None)
    starts = np.concatenate([[0], np.cumsum(sizes.prod(1) * 3)])
    with (folder / PIXELS).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, int(starts[-1])))
    pixels = np.memmap(folder / PIXELS, np.uint8, "r+")

    def fill(number: int) -> None:
        image = decode(listing.read(number), listing.limits)
        if tuple(image.shape[-2:]) != tuple(sizes[number]):
            raise BadImage(f"its header says {tuple(sizes[number])}, but it has {tuple(image.shape[-2:])} pixels")
        pixels[starts[number] : starts[number + 1]] = image.permute(1, 2, 0).reshape(-1).numpy()

    _each(listing, np.flatnonzero(sizes.prod(1)), fill, bad, on_done)
    pixels.flush()
    np.save(folder / SIZES, sizes)
    return {"bad": bad}


def _each(
    listing: Listing, numbers: np.ndarray, work: Callable[[int], object], bad: dict[str, str], on_done: OnDone
) -> None:
    """Do the work for each index, on all cores; broken images go into ``bad`` with their reason."""

    def one(number: int) -> tuple[int, str]:
        try:
            work(number)
        except (BadImage, OSError) as error:
            return number, why(error)
        return number, ""

    with ThreadPoolExecutor(hardware.cores()) as threads:
        for start in range(0, len(numbers), AT_A_TIME):
            for number, reason in threads.map(one, numbers[start : start + AT_A_TIME].tolist()):
                if reason:
                    bad[listing.names[number]] = reason
            on_done(min(start + AT_A_TIME, len(numbers)), len(numbers))
