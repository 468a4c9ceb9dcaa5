"""The listing of a split's images: where their bytes lie and what their labels are. Imports nothing heavy."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from trainer.data.folder_walk import FoundFile, Walk, is_hidden, leads_back, once_each
from trainer.data.images.image_files import ImageFiles, head_of, is_image
from trainer.data.limits import DEFAULTS, Limits
from trainer.data.regular_files import read_regular
from trainer.visible import one_line

DECODED_AS = b"2: AVIF without its transparency"
"""Part of the digest: another text when decoding gives other pixels, so that kept pixels are made again."""


@dataclass(frozen=True)
class TableRows:
    """The rows of a table that a listing has: (N,) numbers from 0 on, the table's path, and the key that names it."""

    path: str
    key: str
    rows: np.ndarray


@dataclass
class Listing:
    """The list of a split's images: where their bytes lie, and their labels.

    Attributes:
        files: paths of the files that hold the images, each once.
        file: (N,) number of the file of each image.
        spans: (N, 2) first byte and length within it; length -1: the whole file.
        labels: (N,) int64.
        names: (N,) a short name of each image, for messages.
        number: (N,) index of each image in the whole listing, before broken images were left out.
        limits: of one image.
        passed_over: sentences about files that look like images and are not listed.
        missing: links to images that are not there.
        linked: some files may have several names (links).
        root: folder from which names in messages lead; '': names are whole paths.
        table: the rows of a table that the images come from; None: they come from no table.
        said: sentences about files in the same folders that are not used.
    """

    files: list[str]
    file: np.ndarray
    spans: np.ndarray
    labels: np.ndarray
    names: list[str]
    number: np.ndarray
    limits: Limits = DEFAULTS
    passed_over: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    linked: bool = False
    said: tuple[str, ...] = ()
    root: str = ""
    table: TableRows | None = None

    @staticmethod
    def of_files(paths: list[str], labels: np.ndarray, limits: Limits = DEFAULTS) -> Listing:
        """Make a listing of files that hold one image each."""
        spans = np.tile(np.array([0, -1], np.int64), (len(paths), 1))
        everything = np.arange(len(paths))
        return Listing(paths, everything, spans, labels, [one_line(path) for path in paths], everything, limits)

    def __len__(self) -> int:
        return len(self.file)

    def read(self, number: int, most: int | None = None) -> bytes:
        """Read the encoded bytes of the image with this index, or the first ``most`` of them.

        Raises:
            OSError: the file is gone, or no regular file any more, or larger than the limit.
        """
        start, length = self.spans[number].tolist()
        path = self.files[self.file[number]]
        if most is not None:
            length = min(most, os.stat(path).st_size if length < 0 else length)
        return read_regular(path, self.limits, start, length)

    def short_name(self, number: int) -> str:
        """The name of the image with this index, relative to ``root``: ``val/rose/7.jpg``, ``shard.tar:7.jpg``."""
        return (
            self.names[number].removeprefix(one_line(os.path.join(self.root, ""))) if self.root else self.names[number]
        )

    def without(self, names: set[str]) -> Listing:
        """A copy of this listing without the images of these names."""
        if not names:
            return self
        return self.subset(np.flatnonzero([name not in names for name in self.names]))

    def split(self, fraction: float, seed: int) -> tuple[Listing, Listing]:
        """Divide this listing into training and validation; ``fraction`` of each class is held out for validation."""
        classes = self.labels if self.labels.dtype == np.int64 else np.zeros(len(self), np.int64)
        out = _held_out(classes, fraction, seed)
        return self.subset(np.flatnonzero(~out)).renumbered(), self.subset(np.flatnonzero(out)).renumbered()

    def renumbered(self) -> Listing:
        """A copy of this listing whose samples are numbered from 0, as a whole data set of their own."""
        return replace(self, number=np.arange(len(self)))

    def subset(self, chosen: np.ndarray) -> Listing:
        """A copy of this listing with the images of these indices (N,), in their order."""
        return replace(
            self,
            file=self.file[chosen],
            spans=self.spans[chosen],
            labels=self.labels[chosen],
            names=[self.names[index] for index in chosen.tolist()],
            number=self.number[chosen],
            table=self.table and replace(self.table, rows=self.table.rows[chosen]),
        )

    def digest(self) -> str:
        """A hash (24 hexadecimal digits) of what is listed, and of the files' sizes and times."""
        hashed = hashlib.blake2b(DECODED_AS, digest_size=12)
        for path in self.files:
            about = os.stat(path)
            hashed.update(f"{path}\0{about.st_size}\0{about.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
        for array in (self.file, self.spans, self.labels):
            hashed.update(np.ascontiguousarray(array).tobytes())
        return hashed.hexdigest()


def images_in(folder: Path) -> tuple[list[str], list[str]]:
    """List all images below a folder as sorted relative paths; also returns what is passed over, and why.

    Links to folders are followed, each folder once. What is no regular file is listed: its row says so.
    """
    walk, files = Walk().through([str(folder)]), ImageFiles()
    paths = [os.path.relpath(entry.path, folder) for entry in walk.entries if _used(files, entry)]
    return sorted(paths), [*walk.again, *_hidden(walk), *files.unused()]


def _used(files: ImageFiles, entry: FoundFile) -> bool:
    return files.uses(entry.path, lambda: b"" if entry.broken else head_of(entry.path))


def _hidden(walk: Walk) -> list[str]:
    """Hidden folders, and hidden files with an image's name."""
    found = [(path, os.path.isdir(path)) for path in sorted(walk.hidden)]
    return [
        f"{one_line(path)} is a {'folder of the system or a hidden one' if folder else 'hidden file'}"
        for path, folder in found
        if folder or is_image(path)
    ]


def class_folders(root: Path) -> list[str]:
    """List the class folders of an image folder, sorted by name, without hidden ones and links that lead back."""
    found = (entry for entry in os.scandir(root) if entry.is_dir() and not is_hidden(entry.name))
    return sorted(entry.name for entry in found if not (entry.is_symlink() and leads_back(entry.path)))


def folder_of_classes(root: Path, classes: list[str], limits: Limits = DEFAULTS) -> Listing:
    """List the images below ``root/<class>/``, sorted by path; the label is the class's index in ``classes``.

    Only regular files count, each once: what else has an image's name is in ``passed_over``.
    """
    walk, files = Walk().through([os.path.join(root, name) for name in classes]), ImageFiles()
    found, passed, missing = once_each([entry for entry in walk.entries if _used(files, entry)])
    found.sort(key=lambda entry: (entry.root, entry.path))
    listing = Listing.of_files(
        [entry.path for entry in found], np.array([entry.root for entry in found], np.int64), limits
    )
    linked = any(entry.linked or (entry.about and entry.about.st_nlink > 1) for entry in found)
    over = (*_no_classes(root), *walk.again, *_hidden(walk), *passed)
    return replace(listing, passed_over=over, missing=tuple(missing), linked=linked, said=files.said())


def _no_classes(root: Path) -> list[str]:
    """Folders of a system in the place of class folders, and links that lead back or nowhere."""
    system = sorted(e.path for e in os.scandir(root) if e.is_dir() and is_hidden(e.name) and not e.name.startswith("."))
    links = sorted(entry.path for entry in os.scandir(root) if entry.is_symlink())
    nowhere = [f"{one_line(link)} leads nowhere" for link in links if not os.path.exists(link)]
    back = [link for link in links if os.path.isdir(link) and leads_back(link)]
    named = [f"{one_line(path)} is a folder of the system" for path in system]
    return [*named, *nowhere, *(f"{one_line(link)} leads back to a folder that it lies in" for link in back)]


def _held_out(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """A boolean mask of the images held out for validation: ``fraction`` of each class, at least one if it has two."""
    chosen = np.zeros(len(labels), bool)
    random = np.random.default_rng(seed)
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        chosen[members[: min(len(members) - 1, max(1, round(fraction * len(members))))]] = True
    return chosen
