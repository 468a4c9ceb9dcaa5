"""data=cifar10: the 60,000 images (3, 32, 32) of CIFAR-10, or small drawn flowers in their place, with a warning."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.schema import Cifar10Data
from trainer.data.arrays.array_source import ArraySource
from trainer.data.arrays.npy_files import Pair
from trainer.data.download import File, Site
from trainer.data.drawn_flowers.draw import VERSION, Drawing, draw, folder
from trainer.data.drawn_flowers.species import class_names
from trainer.data.images.listing import class_folders, folder_of_classes
from trainer.data.limits import DEFAULTS, Limits
from trainer.data.regular_files import read_regular
from trainer.data.sets.plain_pickle import Array, NotPlain, loads
from trainer.data.source import Facts, OnProgress
from trainer.errors import UserError, why
from trainer.host.cache import check_data
from trainer.visible import LONGEST_NAME

FOLDER = "cifar-10-batches-py"
TRAIN, VAL = [f"data_batch_{n}" for n in range(1, 6)], ["test_batch"]
SITE = Site(
    "CIFAR-10",
    "https://www.cs.toronto.edu/~kriz/",
    "",
    (File("cifar-10-python.tar.gz", 170498071, "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"),),
)
DRAWN = Drawing(classes=10, per_class=100, size=32)
SIDE, CLASSES = 32, 10


class Cifar10(ArraySource):
    """data=cifar10: CIFAR-10 in torchvision's layout; if it cannot be had, 2,000 drawn flowers of 10 species.
    Or a refusal, as ``data.on_missing`` says."""

    Options = Cifar10Data
    options: Cifar10Data

    site, top, samples, shape = SITE, FOLDER, (50000, 10000), (3, SIDE, SIDE)
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    val_file = VAL[0]

    def found_in(self) -> Path | None:
        return Path(self.options.root) if all(path.is_file() for path in self.files()) else None

    def stand_in(self) -> tuple[str, tuple[int, int], str]:
        check_data(folder(DRAWN))
        samples = DRAWN.classes * DRAWN.per_class
        what = "embedded drawn flowers of 10 species, 32 pixels"
        return what, (samples, samples), "2,000 drawn flowers of 10 species are used"

    def prepare(self, facts: Facts, progress: OnProgress) -> Facts:
        facts = super().prepare(facts, progress)
        if facts.kind == "embedded":
            draw(DRAWN, on_progress=partial(progress, "drawing small flowers"))
        return facts

    def files(self) -> list[Path]:
        return [self._folder() / name for name in [*TRAIN, *VAL]]

    def embedded(self) -> tuple[Pair, Pair]:
        return _drawn("train"), _drawn("val")

    def drawing(self) -> tuple[Any, ...]:
        return VERSION, asdict(DRAWN)

    def class_names(self, facts: Facts) -> list[str]:
        """The names of the ten classes."""
        if facts.kind == "embedded":
            return class_names(DRAWN.classes)
        path = self._folder() / "batches.meta"
        names = _unpickled(path, Limits.of(self.options)).get("label_names")
        if (
            not isinstance(names, list)
            or len(names) != CLASSES
            or not all(isinstance(name, str) and len(name) <= LONGEST_NAME for name in names)
        ):
            raise _wrong(path, f"it does not name {CLASSES} classes")
        return names

    def _folder(self) -> Path:
        return Path(self.options.root) / FOLDER

    def read(self) -> tuple[Pair, Pair]:
        pairs = {path: self._one(path) for path in self.files()}
        self.refuse_labels({path: labels for path, (_, labels) in pairs.items()})
        every = list(pairs.values())
        return _joined(every[: len(TRAIN)]), _joined(every[len(TRAIN) :])

    def _one(self, path: Path) -> Pair:
        """The images and labels of a file.

        Raises:
            UserError: it is damaged.
        """
        content = _unpickled(path, Limits.of(self.options))
        try:
            data, labels = content["data"], content["labels"]
            pixels = data.made() if isinstance(data, Array) else np.zeros(0)
            if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3 * SIDE * SIDE:
                raise NotPlain(f"its images are {pixels.dtype} {pixels.shape} and not uint8 (N, 3072)")
            if isinstance(labels, Array):
                labels = labels.made()
            numbers = labels.tolist() if isinstance(labels, np.ndarray) and labels.size <= len(pixels) else labels
            if isinstance(numbers, np.ndarray):
                raise NotPlain(f"it has {len(pixels)} images and {numbers.size} labels")
            if not isinstance(numbers, list) or not all(type(n) is int and abs(n) < 2**63 for n in numbers):
                raise NotPlain("its labels are no list of whole numbers")
        except KeyError as error:
            raise _wrong(path, f"it has no {error.args[0]!r}") from error
        except NotPlain as error:
            raise _wrong(path, str(error)) from error
        if len(pixels) != len(numbers):
            raise UserError(
                f"data.root={self.options.root}",
                f"{path} has {len(pixels)} images and {len(numbers)} labels",
                "fetch it anew",
            )
        return pixels.reshape(-1, 3, SIDE, SIDE), np.array(numbers, np.int64)


def _joined(pairs: list[Pair]) -> Pair:
    images, labels = zip(*pairs, strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _drawn(split: str) -> Pair:
    from trainer.data.augment.views import CentreView
    from trainer.data.images.decode import decode

    root = folder(DRAWN) / split
    listing = folder_of_classes(root, class_folders(root))
    centre = CentreView(SIDE, SIDE)
    return np.stack([centre.one(decode(listing.read(n))).numpy() for n in range(len(listing))]), listing.labels


def _unpickled(path: Path, limits: Limits = DEFAULTS) -> dict[str, Any]:
    """Read a pickled file of CIFAR-10 as a dict, without running anything in it.

    Raises:
        UserError: it is not such a file.
    """
    try:
        content = loads(read_regular(path, limits))
        if not isinstance(content, dict):
            raise NotPlain("it holds no dict")
    except (NotPlain, OSError) as error:
        raise _wrong(path, why(error)) from error
    return content


def _wrong(path: Path, reason: str) -> UserError:
    return UserError(f"data.root={path.parent.parent}", f"{path} is not a file of CIFAR-10: {reason}", "fetch it anew")
