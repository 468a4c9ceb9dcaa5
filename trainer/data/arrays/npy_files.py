"""The images and labels of a split as two .npy files of a folder, which all workers of a host map into memory."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from trainer.errors import RunFailed, why

Pair = tuple[Any, Any]
"""Images (N, C, H, W) and labels (N,) int64, as arrays of numpy."""


def keep(folder: Path, split: str, images: Any, labels: Any) -> None:
    """Write a split's images and labels as two .npy files."""
    np.save(folder / f"{split}.npy", images)
    np.save(folder / f"{split}.labels.npy", labels)


def mapped(folder: Path, split: str) -> Pair:
    """Map a split's images into memory, in pages that processes share, and read its labels.

    Raises:
        RunFailed: the files are gone or damaged.
    """
    try:
        images = np.load(folder / f"{split}.npy", mmap_mode="c").view(np.ndarray)  # private: nobody writes
        labels = np.load(folder / f"{split}.labels.npy")
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images and {len(labels)} labels")
    except (OSError, ValueError, EOFError) as error:
        raise RunFailed(
            f"the arrays of {split} in {folder} are gone or damaged: {why(error)}. Without that folder they "
            f"are made anew."
        ) from error
    return images, labels


def digest(images: Any, labels: Any) -> str:
    """SHA-256 (32 hexadecimal digits) of the values and shapes of two arrays, by which their .npy files are known."""
    hashed = hashlib.sha256()
    for array in (images, labels):
        hashed.update(f"{array.dtype.str} {array.shape}\n".encode())
        hashed.update(np.ascontiguousarray(array).data)
    return hashed.hexdigest()[:32]
