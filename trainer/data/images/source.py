"""Base of data sources of image files: random crops and centre views, checks, the decoded cache."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.config.schema import ImagesData
from trainer.data.images.header import GPU_MODES, BadImage, opened, size_of
from trainer.data.images.listing import Listing
from trainer.data.limits import Limits
from trainer.data.picture_preprocessing import Centre, Preprocessing, normalisation
from trainer.data.prepared import cache_root
from trainer.data.source import DataSource, Facts, OnProgress, Splits, digest_of, named_sizes
from trainer.errors import UserError
from trainer.hashing import hash_of
from trainer.host.cache import check_data
from trainer.host.files import free_disk
from trainer.host.memory import free_of_machine
from trainer.visible import shortened
from trainer.wording import some

if TYPE_CHECKING:
    from trainer.data.images.dataset import View

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's training images, by channel."""

SPLITS = ("train", "val", "test")
"""In the order of ``listings``, which may have no test images."""
MEASURED = 48
"""Images whose headers are read to estimate the decoded size of all."""
HEADER_BYTES = 1 << 16
"""First bytes of a file in which its size and colours are found."""
SHARE_OF_MEMORY, SHARE_OF_DISK = 0.25, 0.5
"""Largest shares of the free memory and of the free disk space that ``data.cache=auto`` uses."""


class ImageSource(DataSource):
    """Base class of data sources of image files, seen as (3, S, S) uint8: random crops to train, else the centre."""

    Options = ImagesData
    options: ImagesData

    @abstractmethod
    def listings(self, facts: Facts) -> tuple[Listing, ...]:
        """Return the listings of the training and the validation images, and of test images where there are some.

        Raises:
            OSError: the images are not there yet.
        """

    def facts_of(self, source: str, kind: str, listings: Sequence[Listing], classes: int, splits: str) -> Facts:
        """Return the facts of listings of training, validation, and test images where there are some."""
        train, val, *tests = map(len, listings)
        test = sum(tests)
        return Facts(source, kind, train, val, self.shape(), classes, slow=True, test_samples=test, splits=splits)

    def with_cache(self, facts: Facts, listings: tuple[Listing, ...] | None = None) -> Facts:
        """Return the facts with the validation images' size, and with the decision on the cache if the images exist."""
        facts = self._with_cache(facts, listings)
        if facts.cached:
            return replace(facts, undecodable="decoded images are kept (data.cache)")
        return replace(facts, undecodable=self._on_cpu() or self._undecodable(facts, listings))

    def _with_cache(self, facts: Facts, listings: tuple[Listing, ...] | None) -> Facts:
        side, wide, resize = self._centre()[1], self.options.image_size, self.options.train_resize
        if resize is not None and resize < wide:
            raise UserError(
                f"data.train_resize={resize}",
                f"is less than data.image_size={wide}, the window that is cut from it",
                f"data.train_resize={round(wide * 8 / 7)}",
            )
        facts = replace(facts, val_shape=(3, side, side) if side != self.options.image_size else None)
        wanted = self.options.cache
        if wanted == "auto" and self.options.decode == "gpu":
            return replace(facts, cached=False, cache="none: the GPU decodes each image anew (data.decode=gpu)")
        if wanted == "none":
            return replace(facts, cached=False, cache="none: images are decoded each time")
        try:
            listings = listings or self.listings(facts)
            total = sum(map(_decoded_bytes, listings))
        except OSError:
            slow = wanted != "device"
            return replace(facts, cached=None, slow=slow, cache=f"{wanted}: decided when the images are there")
        memory, disk = free_of_machine(), free_disk(self._cache_folder())
        places = [self._place(split, listing) for split, listing in zip(SPLITS, listings, strict=False)]
        there = all(place.is_dir() for place in places)
        fits = total <= SHARE_OF_MEMORY * memory and (there or total <= SHARE_OF_DISK * disk)
        size = f"{total / 2**30:.1f} GiB decoded"
        if wanted == "auto" and not fits:
            return replace(
                facts,
                cached=False,
                cache=(
                    f"none: {size} do not fit {memory / 2**30:.1f} GiB of free memory and {disk / 2**30:.1f} GiB "
                    f"of disk"
                ),
            )
        if not there and total > disk:
            raise UserError(
                f"data.cache={wanted}",
                f"{size} do not fit {disk / 2**30:.1f} GiB of free disk in {self._cache_folder()}",
                "data.cache=none or data.cache_dir=FOLDER",
            )
        check_data(places[0])
        if wanted == "device":
            cache = f"{size}, on the device of each worker ({self._cache_folder()})"
            return replace(facts, cached=True, slow=False, cache=cache, resident=total)
        return replace(
            facts, cached=True, cache=f"{size}, in memory shared by this host's workers ({self._cache_folder()})"
        )

    def _undecodable(self, facts: Facts, listings: tuple[Listing, ...] | None) -> str:
        """Why a GPU cannot decode the training images, of which some headers are read; empty: it can."""
        try:
            return _no_jpeg((listings or self.listings(facts))[0])
        except OSError:
            return "the images are not there yet"

    def _on_cpu(self) -> str:
        """Why training images are changed on the CPU; empty: they need not be."""
        if self.options.augment != "none":
            return f"data.augment={self.options.augment} changes images one by one on the CPU"
        return "data.transforms change images one by one on the CPU" if self.options.transforms else ""

    def reading_rate(self, facts: Facts) -> float:
        """Decode some training images for a moment in this process, and cut views from them; with a cache only the
        views count. Returns images per second, 0 if there are no images yet."""
        from trainer.data.images.reading_rate import reading_rate

        try:
            whole = self.listings(facts)[0]
        except OSError:
            return 0.0
        return reading_rate(whole, self._training_view(), bool(facts.cached))

    def prepare(self, facts: Facts, progress: OnProgress) -> Facts:
        """Decode the images that are to be cached or checked; broken images end the run, or are left out.

        Raises:
            UserError: images are broken and ``data.on_bad`` is ``error``.
        """
        if facts.cached is None:
            facts = self.with_cache(facts)
        if not facts.cached and not self.options.verify:
            return facts
        from trainer.data.images.cache import keep_decoded, verified

        bad: dict[str, str] = {}
        for split, listing in self._by_split(facts):
            if facts.cached:
                bad |= keep_decoded(listing, self._place(split, listing), partial(progress, f"decoding {split} images"))
            else:
                bad |= verified(listing, partial(progress, f"checking {split} images"))
        if not bad:
            return facts
        return self._without(facts, bad)

    def _without(self, facts: Facts, bad: dict[str, str]) -> Facts:
        named = some([f"{shortened(name)}: {reason}" for name, reason in bad.items()])
        said = (
            f"{len(bad)} of {facts.train_samples + facts.val_samples + facts.test_samples} images cannot be "
            f"decoded: {named}"
        )
        if self.options.on_bad == "error":
            raise UserError(f"data ({facts.source})", said, "data.on_bad=skip, or repair them")
        print(f"ATTENTION: {said}. They are left out (data.on_bad=skip).", flush=True)
        train, *others = self.listings(facts)
        left = [listing.without(set(bad)) for listing in (train, *others)]
        if not all(len(listing) for listing in left):
            raise UserError(f"data ({facts.source})", f"no image is left: {said}")
        classes = facts.task == "classification"
        if classes and (lost := sorted(set(train.labels.tolist()) - set(left[0].labels.tolist()))):
            names = self.class_names(facts) or [str(label) for label in range(facts.classes)]
            raise UserError(
                f"data ({facts.source})",
                f"no training image is left of {some([shortened(names[n]) for n in lost])}: {said}",
                "put whole images into these classes, or remove them",
            )
        sizes = [len(listing) for listing in left]
        return replace(facts, left_out=bad, train_samples=sizes[0], val_samples=sizes[1], test_samples=sum(sizes[2:]))

    def open(self, facts: Facts) -> Splits:
        from trainer.data.augment.views import CentreView
        from trainer.data.images.dataset import ImageSet

        train, *others = (
            (whole.without(set(facts.left_out)), self._place(split, whole) if facts.cached else None)
            for split, whole in self._by_split(facts)
        )
        centres = CentreView(*self._centre())
        val, test = [*(ImageSet(listing, centres, cache) for listing, cache in others), None][:2]
        crops = ImageSet(train[0], self._training_view(), train[1])
        return Splits(crops, val, *normalisation(self.options, MEAN, STD), test)

    def _training_view(self) -> View:
        """The random view of a training image that the options ask for."""
        from trainer.data.augment.views import Augmentation, TrainView, WindowView

        options, augmentation = self.options, Augmentation.of(self.options, MEAN)
        if options.train_resize is not None:
            return WindowView(options.train_resize, options.image_size, augmentation)
        ratio = (options.min_ratio, 1 / options.min_ratio)
        return TrainView(options.image_size, (options.min_scale, 1.0), ratio, augmentation)

    sees_pictures = True

    def preprocessing(self, facts: Facts) -> Preprocessing:
        limits = Limits.of(self.options)
        return Preprocessing(Centre(*self._centre(), limits=limits), *normalisation(self.options, MEAN, STD), limits)

    def fingerprint(self, facts: Facts) -> str:
        """A fingerprint of the files' names and sizes and the labels, without test images: no training depends on
        them."""
        content: list[Any] = []
        for listing in self.listings(facts)[:2]:
            left_out = [number for number, name in enumerate(listing.names) if name in facts.left_out]
            content += [named_sizes(listing.files), listing.spans.tolist(), listing.labels.tolist(), left_out]
        return digest_of(*content)

    def _centre(self) -> tuple[int, int]:
        """Sides of a validation image: of the shorter side after resizing, and of the centre crop."""
        val_size = self.options.val_size or self.options.image_size
        return max(self.options.val_resize or round(val_size * 8 / 7), val_size), val_size

    def shape(self) -> tuple[int, int, int]:
        """The shape (3, S, S) of one training image."""
        return 3, self.options.image_size, self.options.image_size

    def _by_split(self, facts: Facts) -> list[tuple[str, Listing]]:
        return list(zip(SPLITS, self.listings(facts), strict=False))

    def _cache_folder(self) -> Path:
        return Path(self.options.cache_dir or cache_root() / "decoded")

    def _place(self, split: str, listing: Listing) -> Path:
        """The folder for the decoded images of a split; it has another name after a file has changed."""
        owner = hash_of(f"{listing.files[0] if listing.files else ''}/{split}")
        return self._cache_folder() / f"{owner:016x}-{listing.digest()}"


def _no_jpeg(listing: Listing) -> str:
    """Why a GPU cannot decode some of a listing's images; empty: those whose headers are read are JPEGs.

    Raises:
        OSError: an image is not there.
    """
    for number in _some(listing):
        with suppress(BadImage), opened(listing.read(number, HEADER_BYTES), listing.limits) as image:
            if image.format != "JPEG" or image.mode not in GPU_MODES:
                kind = image.format if image.format != "JPEG" else f"JPEG of {image.mode}"
                return f"{shortened(listing.short_name(number))} is {kind}, and a GPU decodes JPEGs of RGB or grey"
    return ""


def _some(listing: Listing) -> list[int]:
    """The indices of some images, spread over a listing."""
    found: list[int] = np.unique(np.linspace(0, len(listing) - 1, min(MEASURED, len(listing))).astype(int)).tolist()
    return found


def _decoded_bytes(listing: Listing) -> int:
    """Estimate the memory (bytes) that a listing's decoded images would take, from the headers of some of them.

    Raises:
        OSError: an image is not there.
    """
    sizes = []
    for number in _some(listing):
        content = listing.read(number)
        with suppress(BadImage):  # broken images are looked for elsewhere
            sizes.append(3 * math.prod(size_of(content, listing.limits)))
    return int(np.mean(sizes) * len(listing)) if sizes else 0
