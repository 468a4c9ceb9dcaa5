"""Which images a split has: where their bytes lie and what their labels are. Imports nothing heavy."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".gif", ".avif")


@dataclass
class Listing:
    """Images of a split.

    Attributes:
        files: paths of the files that hold the images, each once.
        file: (N,) number of the file of each image.
        spans: (N, 2) first byte and length within it; length -1: the whole file.
        labels: (N,) int64.
        names: (N,) a short name of each image, for messages.
        number: (N,) its number in the whole listing, from which some may have been left out.
    """

    files: list[str]
    file: np.ndarray
    spans: np.ndarray
    labels: np.ndarray
    names: list[str]
    number: np.ndarray

    @staticmethod
    def of_files(paths: list[str], labels: np.ndarray) -> Listing:
        """One image per file."""
        spans = np.tile(np.array([0, -1], np.int64), (len(paths), 1))
        everything = np.arange(len(paths))
        return Listing(paths, everything, spans, labels, paths, everything)

    def __len__(self) -> int:
        return len(self.file)

    def read(self, number: int) -> bytes:
        """The encoded image.

        Raises:
            OSError: the file is gone.
        """
        start, length = self.spans[number].tolist()
        with open(self.files[self.file[number]], "rb") as source:
            if length < 0:
                return source.read()
            source.seek(start)
            return source.read(length)

    def without(self, names: set[str]) -> Listing:
        """The rest, when these are left out."""
        if not names:
            return self
        return self._only(np.array([name not in names for name in self.names], bool))

    def split(self, fraction: float, seed: int) -> tuple[Listing, Listing]:
        """Training and validation: that share of each class is held out."""
        out = held_out(self.labels, fraction, seed)
        return self._only(~out).renumbered(), self._only(out).renumbered()

    def renumbered(self) -> Listing:
        """The same as a whole listing of its own."""
        return replace(self, number=np.arange(len(self)))

    def _only(self, chosen: np.ndarray) -> Listing:
        names = [name for name, keep in zip(self.names, chosen, strict=True) if keep]
        return Listing(
            self.files, self.file[chosen], self.spans[chosen], self.labels[chosen], names, self.number[chosen]
        )

    def digest(self) -> str:
        """24 hexadecimal digits of what is listed and of the files' sizes and times."""
        hashed = hashlib.blake2b(digest_size=12)
        for path in self.files:
            about = os.stat(path)
            hashed.update(f"{path}\0{about.st_size}\0{about.st_mtime_ns}\n".encode())
        for array in (self.file, self.spans, self.labels):
            hashed.update(np.ascontiguousarray(array).tobytes())
        return hashed.hexdigest()


def images_in(folder: Path) -> list[str]:
    """Paths of all images in a folder and the folders in it, relative to it, with slashes, sorted.

    Links to folders are not followed: they may lead back.
    """
    found = []
    for place, _, names in os.walk(folder):
        wanted = [Path(place, name) for name in names if name.lower().endswith(EXTENSIONS)]
        found += [path.relative_to(folder).as_posix() for path in wanted]
    return sorted(found)


def class_folders(root: Path) -> list[str]:
    """Names of the folders in a folder, sorted, which are its classes; hidden ones do not count."""
    return sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))


def folder_of_classes(root: Path, classes: list[str]) -> Listing:
    """The images below ``root/<class>/``, sorted by path; the label is the class's place in the list."""
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        mine = sorted(
            os.path.join(folder, file)
            for folder, _, files in os.walk(root / name, followlinks=True)
            for file in files
            if file.lower().endswith(EXTENSIONS)
        )
        paths += mine
        labels += [label] * len(mine)
    return Listing.of_files(paths, np.array(labels, np.int64))


def held_out(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Which samples are held out for validation: the fraction of each class, at least one of those with two."""
    chosen = np.zeros(len(labels), bool)
    random = np.random.default_rng(seed)
    for label in np.unique(labels):
        mine = random.permutation(np.flatnonzero(labels == label))
        chosen[mine[: min(len(mine) - 1, max(1, round(fraction * len(mine))))]] = True
    return chosen
