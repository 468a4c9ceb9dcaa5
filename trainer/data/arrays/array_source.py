"""Base of data sources of small images in memory (MNIST, CIFAR-10), augmented as tensors, a whole batch at a time."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.config.schema import ArraysData
from trainer.data.arrays.npy_files import Pair, digest, keep, mapped
from trainer.data.limits import Limits
from trainer.data.picture_preprocessing import Centre, Channels, Preprocessing, normalisation
from trainer.data.prepared import known, made_once, place_of
from trainer.data.source import DataSource, Facts, Progress, Splits, digest_of
from trainer.errors import UserError

SPLITS = ("train", "val")


class ArraySource(DataSource):
    """Base class of data sources of small images of one size, kept as arrays in the user's cache, once per host.

    Attributes:
        mean, std: of the training images, by channel.
        val_file: the file that the validation images are read from, in its order.
    """

    Options = ArraysData
    options: ArraysData

    mean: tuple[float, ...]
    std: tuple[float, ...]
    val_file: str

    @abstractmethod
    def files(self) -> list[Path]:
        """The paths of the files that this data set is read from; the set is there if all of them exist."""

    @abstractmethod
    def read(self) -> tuple[Pair, Pair]:
        """Read the training and the validation samples from this set's files.

        Raises:
            UserError: a file is damaged, or a label is not of the set's classes.
        """

    @abstractmethod
    def embedded(self) -> tuple[Pair, Pair]:
        """The samples of the embedded stand-in, used where this data set's files cannot be had."""

    def drawing(self) -> tuple[Any, ...]:
        """The parameters from which the embedded stand-in is drawn, for its fingerprint."""
        return ()

    def counted(self) -> list[int]:
        """The number of samples in each split. Reads files that are not in the cache, so that damaged ones are refused.

        Raises:
            UserError: as ``read``.
        """
        noted = known(self._place())
        return noted["samples"] if noted else [len(labels) for _, labels in self.read()]

    def divided(self, facts: Facts) -> Facts:
        """The facts with a part of the training images as validation, where ``data.val_fraction`` asks for it.
        The set's own second part is the test then."""
        share = self.options.val_fraction
        if share is None:
            said = (
                "validation is on the set's test images, as in the reference (data.val_fraction=0.1 holds out "
                "training images, and keeps these for the test)"
            )
            return replace(facts, splits=said)
        val = min(facts.train_samples - 1, max(1, round(share * facts.train_samples)))
        said = (
            f"validation is {share:g} of the training images (data.val_fraction), held out by "
            f"data.split_seed={self.options.split_seed}; the test is on the set's test images"
        )
        train, test = facts.train_samples - val, facts.val_samples
        return replace(facts, splits=said, train_samples=train, val_samples=val, test_samples=test)

    def kept(self, kind: str, samples: int, *shape: int) -> str:
        """A sentence for the plan about the memory that the arrays take."""
        size = f"{samples * math.prod(shape) / 2**20:.0f} MiB as uint8"
        if kind == "embedded":
            return f"{size}, in memory of each worker"
        return f"{size}, mapped by all workers of a host" + (f" ({self._place()})" if kind == "real" else "")

    def prepare(self, facts: Facts, progress: Progress) -> Facts:
        """Before the workers start: write this source's images as arrays to the user's cache, unless they are there."""
        if facts.kind == "real":
            made_once(self._place(), self._write)
        return facts

    def fingerprint(self, facts: Facts) -> str:
        """A fingerprint of the images and labels themselves, wherever they lie and however they are augmented."""
        held = [] if self.options.val_fraction is None else [self.options.val_fraction, self.options.split_seed]
        if facts.kind == "embedded":
            return digest_of(facts.source, *self.drawing(), *held)
        if facts.kind != "real":  # mode=predict looks at other files, and fetches nothing
            return super().fingerprint(facts)
        noted = known(self._place())
        return digest_of(*(noted["digests"] if noted else [digest(*pair) for pair in self.read()]), *held)

    sees_pictures = True

    def preprocessing(self, facts: Facts) -> Preprocessing:
        channels, _, side = facts.shape
        limits = Limits.of(self.options)
        return Preprocessing(Centre(side, side, channels, limits), *self.normalisation(), limits)  # type: ignore[arg-type]

    def normalisation(self) -> tuple[Channels | None, Channels | None]:
        """The mean and the standard deviation by which this source's images are normalised."""
        return normalisation(self.options, self.mean, self.std)

    def open(self, facts: Facts) -> Splits:
        import numpy as np
        import torch

        from trainer.data.arrays.augmented import AugmentedArrays
        from trainer.data.arrays.tensors import ArrayDataset
        from trainer.data.augment.views import Augmentation

        pairs = self.embedded() if facts.kind == "embedded" else [mapped(self._place(), split) for split in SPLITS]
        train, second = ((torch.from_numpy(images), torch.from_numpy(labels)) for images, labels in pairs)
        evaluated, test = ArrayDataset(*second, self.val_file if facts.kind == "real" else ""), None
        if self.options.val_fraction is not None:
            order = torch.from_numpy(np.random.default_rng(self.options.split_seed).permutation(len(train[1])))
            held, rest = order[: facts.val_samples].sort()[0], order[facts.val_samples :].sort()[0]
            images, labels = train
            train, test, evaluated = (images[rest], labels[rest]), evaluated, ArrayDataset(images[held], labels[held])
        crops = AugmentedArrays(*train, self.options.pad_crop, Augmentation.of(self.options, self.mean))
        return Splits(crops, evaluated, *self.normalisation(), test)

    def refuse_labels(self, labels: dict[Path, Any], classes: int) -> None:
        """Refuse a data set that has labels outside 0 to ``classes`` - 1.

        Raises:
            UserError: some are not; how many, and where the first is.
        """
        wrong = [
            (path, n, v)
            for path, values in labels.items()
            for n, v in enumerate(values.tolist())
            if not 0 <= v < classes
        ]
        if wrong:
            path, number, value = wrong[0]
            total = sum(len(values) for values in labels.values())
            raise UserError(
                f"data.root={self.options.root}",
                (
                    f"{len(wrong)} of {total} labels are wrong, which should be 0 to {classes - 1}; the first is "
                    f"{value}, of image {number} in {path}"
                ),
                "fetch it anew",
            )

    def _place(self) -> Path:
        return place_of(type(self).__name__.lower(), self.files())

    def _write(self, folder: Path) -> dict[str, Any]:
        folder.mkdir(parents=True)
        pairs = self.read()
        for split, pair in zip(SPLITS, pairs, strict=True):
            keep(folder, split, *pair)
        return {"samples": [len(labels) for _, labels in pairs], "digests": [digest(*pair) for pair in pairs]}
