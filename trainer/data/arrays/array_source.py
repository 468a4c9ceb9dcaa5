"""Base of data sources of small images in memory (MNIST, CIFAR-10), augmented as tensors, a whole batch at a time."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.config.schema import ArraysData
from trainer.data.arrays.npy_files import Pair, digest, keep, mapped
from trainer.data.download import Site, absent, fetch
from trainer.data.limits import Limits
from trainer.data.picture_preprocessing import Centre, Channels, Preprocessing, normalisation
from trainer.data.prepared import cache_folder, known, prepare_once
from trainer.data.source import DataSource, Facts, OnProgress, Splits, digest_of, held_out
from trainer.errors import UserError

SPLITS = ("train", "val")


class ArraySource(DataSource):
    """Base class of data sources of small images of one size, kept as arrays in the user's cache, once per host.

    ``Facts.kind`` is ``real`` if the set's files are there, ``download`` until they are, and ``embedded`` for the
    stand-in. ``prepare`` turns ``download`` into one of the others.

    Attributes:
        site, top: where the set is fetched from, and the name of its folder in ``data.root``.
        samples: training and test samples of the whole set.
        shape: (C, H, W) of an image; classes: number of classes.
        mean, std: of the training images, by channel.
        val_file: the file that the validation images are read from, in its order.
    """

    Options = ArraysData
    options: ArraysData

    site: Site
    top: str
    samples: tuple[int, int]
    shape: tuple[int, int, int]
    classes = 10
    mean: tuple[float, ...]
    std: tuple[float, ...]
    val_file: str

    def facts(self, global_batch_size: int) -> Facts:
        if (place := self.found_in()) is not None:
            return self._facts(f"{self.site.name} in {place}", "real", self._counted())
        if reason := absent(self.options, self.site, Path(self.options.root) / self.top):
            return self._stand_in(reason)
        return self._facts(f"{self.site.name}, to be downloaded into {self.options.root}", "download", self.samples)

    def _facts(self, source: str, kind: str, counts: Sequence[int], stand_in: str = "") -> Facts:
        total = sum(counts) * math.prod(self.shape)
        size, resident = f"{total / 2**20:.0f} MiB as uint8", total if self.options.cache == "device" else 0
        if resident:
            cache = f"{size}, on the device of each worker"
        elif kind == "embedded":
            cache = f"{size}, in memory of each worker"
        else:
            cache = f"{size}, mapped by all workers of a host" + (f" ({self._place()})" if kind == "real" else "")
        train, second = counts
        facts = Facts(source, kind, train, second, self.shape, self.classes, stand_in, cache=cache, resident=resident)
        return self._with_splits(facts)

    def _stand_in(self, reason: str) -> Facts:
        source, counts, warning = self.stand_in()
        return self._facts(source, "embedded", counts, self.site.stand_in(reason, warning))

    @abstractmethod
    def found_in(self) -> Path | None:
        """The folder in which all files of the set are; None: some are missing."""

    @abstractmethod
    def files(self) -> list[Path]:
        """The paths of the files that this data set is read from."""

    @abstractmethod
    def read(self) -> tuple[Pair, Pair]:
        """Read the training and the validation samples from this set's files.

        Raises:
            UserError: a file is damaged, or a label is not of the set's classes.
        """

    @abstractmethod
    def stand_in(self) -> tuple[str, tuple[int, int], str]:
        """The embedded stand-in: what it is, its training and validation samples, and a clause for the warning."""

    @abstractmethod
    def embedded(self) -> tuple[Pair, Pair]:
        """The samples of the embedded stand-in, used where this data set's files cannot be had."""

    def drawing(self) -> tuple[Any, ...]:
        """The parameters from which the embedded stand-in is drawn, for its fingerprint."""
        return ()

    def _counted(self) -> list[int]:
        """The number of samples in each split. Reads files that are not in the cache, so that damaged ones are refused.

        Raises:
            UserError: as ``read``.
        """
        noted = known(self._place())
        return noted["samples"] if noted else [len(labels) for _, labels in self.read()]

    def _with_splits(self, facts: Facts) -> Facts:
        """The facts with a part of the training images held out for validation, if ``data.val_fraction`` is set.
        The set's own test images are the test then."""
        share = self.options.val_fraction
        if share is None:
            said = (
                "validation is on the set's test images, as in the reference (data.val_fraction=0.1 holds out "
                "training images, and keeps these for the test)"
            )
            return replace(facts, splits=said)
        val = min(facts.train_samples - 1, max(1, round(share * facts.train_samples)))
        said = f"{held_out(self.options, 'the training images')}; the test is on the set's test images"
        train, test = facts.train_samples - val, facts.val_samples
        return replace(facts, splits=said, train_samples=train, val_samples=val, test_samples=test)

    def prepare(self, facts: Facts, progress: OnProgress) -> Facts:
        """Download the set if it is missing, and write its images as arrays to the user's cache unless they exist."""
        if facts.kind == "download":
            reason = fetch(self.options, self.site, lambda: self.found_in() is not None)
            facts = self._stand_in(reason) if reason else self.facts(0)
        if facts.kind == "real":
            prepare_once(self._place(), self._write)
        return facts

    def fingerprint(self, facts: Facts) -> str:
        """A fingerprint of the images and labels themselves, wherever they lie and however they are augmented."""
        held = [] if self.options.val_fraction is None else [self.options.val_fraction, self.options.split_seed]
        if facts.kind == "embedded":
            return digest_of(facts.source, *self.drawing(), *held)
        if facts.kind != "real":  # mode=predict reads other files, and fetches nothing
            return super().fingerprint(facts)
        noted = known(self._place())
        return digest_of(*(noted["digests"] if noted else [digest(*pair) for pair in self.read()]), *held)

    sees_pictures = True

    def preprocessing(self, facts: Facts) -> Preprocessing:
        channels, _, side = self.shape
        limits = Limits.of(self.options)
        return Preprocessing(Centre(side, side, channels, limits), *self.normalisation(), limits)

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

    def refuse_labels(self, labels: dict[Path, Any]) -> None:
        """Refuse a data set that has labels outside 0 to ``classes`` - 1.

        Raises:
            UserError: some are not; how many, and where the first is.
        """
        wrong = [
            (path, n, v)
            for path, values in labels.items()
            for n, v in enumerate(values.tolist())
            if not 0 <= v < self.classes
        ]
        if wrong:
            path, number, value = wrong[0]
            total = sum(len(values) for values in labels.values())
            raise UserError(
                f"data.root={self.options.root}",
                (
                    f"{len(wrong)} of {total} labels are wrong, which should be 0 to {self.classes - 1}; the first is "
                    f"{value}, of image {number} in {path}"
                ),
                "fetch it anew",
            )

    def _place(self) -> Path:
        return cache_folder(type(self).__name__.lower(), self.files())

    def _write(self, folder: Path) -> dict[str, Any]:
        pairs = self.read()
        for split, pair in zip(SPLITS, pairs, strict=True):
            keep(folder, split, *pair)
        return {"samples": [len(labels) for _, labels in pairs], "digests": [digest(*pair) for pair in pairs]}
