"""Measures how many training images one reading process decodes and augments in a second."""

from __future__ import annotations

import time

import numpy as np
import torch

from trainer.data.images.dataset import View
from trainer.data.images.decode import decode
from trainer.data.images.header import BadImage
from trainer.data.images.listing import Listing

SECONDS = 0.25
"""Time after which no further image is read. An image takes some milliseconds."""
MOST = 64
"""Images that are read."""


def reading_rate(listing: Listing, view: View, kept: bool) -> float:
    """Read images of a listing, spread over it, with one thread as a reading process does; returns images per second.

    Args:
        kept: decoded images are kept: what counts is the view alone.

    Broken images are left out. The rate is 0 if no image could be read.
    """
    numbers = np.unique(np.linspace(0, len(listing) - 1, min(MOST, len(listing))).astype(int)).tolist()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        done, spent, begin = 0, 0.0, time.perf_counter()
        for number in numbers:
            since = time.perf_counter()
            try:
                image = decode(listing.read(number), listing.limits)
            except (BadImage, OSError):
                continue
            since = time.perf_counter() if kept else since
            view(iter([image]), np.array([image.shape[-2:]], np.int64), (0, 0), np.array([number]))
            now = time.perf_counter()
            if number != numbers[0] or len(numbers) == 1:  # the first one loads the decoder
                done, spent = done + 1, spent + now - since
            if now - begin > SECONDS and done:
                break
        return done / spent if done else 0.0
    finally:
        torch.set_num_threads(threads)
