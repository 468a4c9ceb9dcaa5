"""data=flowers102 and data=embedded_flowers: Oxford Flowers-102, or the drawn stand-in, with a warning."""

from __future__ import annotations

import errno
import lzma
import tarfile
import zlib
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from trainer.config.schema import EmbeddedFlowersData, Flowers102Data, FlowersData
from trainer.data.download import File, Site, absent, fetch
from trainer.data.drawn_flowers.draw import CLASSES, VERSION, Drawing, draw, is_drawn
from trainer.data.drawn_flowers.draw import folder as drawn_folder
from trainer.data.drawn_flowers.species import class_names, colours, trait_names, traits
from trainer.data.images.listing import Listing, class_folders, folder_of_classes
from trainer.data.images.source import ImageSource
from trainer.data.limits import Limits
from trainer.data.prepared import cache_folder, prepare_once
from trainer.data.regular_files import open_regular, read_regular
from trainer.data.sets.matlab import NotMatlab, arrays
from trainer.data.source import DataSource, Facts, OnProgress, Splits, digest_of
from trainer.errors import UserError, why
from trainer.wording import some

SITE = Site(
    "Oxford Flowers-102",
    "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/",
    "flowers-102",
    (
        File("102flowers.tgz", 344862509, "2d01ecc807db462958cfe3d92f57a8c252b4abd240eb955770201e45f783b246"),
        File("imagelabels.mat", 502, "4903e94206bac23bf772aadf06451916df56b58fc483a62db32a97b82656651d"),
        File("setid.mat", 14989, "46b8678f91fd95d3c8f4feab80d271a6c834a1dd896fe29fd3e6ad9ce5c8dccd"),
    ),
)
PARTS = {
    "trnid": (("trnid",), "valid", "tstid"),
    "tstid": (("tstid",), "valid", "trnid"),
    "trnid+valid": (("trnid", "valid"), "tstid", ""),
}
"""data.train_split -> setid.mat's lists that are trained on, the one for validation, and the one for the test ('': none
is left)."""
SIZES = {"trnid": 1020, "valid": 1020, "tstid": 6149}


TASKS = {"colour": "regression", "traits": "multi_label"}
"""``data.labels`` of the drawn flowers -> ``Facts.task``."""


class DrawnFlowers(ImageSource):
    """Base class of data sources of drawn flowers in the user's cache, the same on every machine."""

    options: FlowersData

    def class_names(self, facts: Facts) -> list[str]:
        return class_names(self._drawing().classes)

    def fingerprint(self, facts: Facts) -> str:
        return digest_of("drawn flowers", VERSION, asdict(self._drawing()))

    def _embedded(self, stand_in: str) -> Facts:
        drawing = self._drawing()
        is_drawn(drawing)  # refused where another user could have put pictures there
        samples, name = drawing.classes * drawing.per_class, "embedded drawn flowers"
        facts = Facts(name, "embedded", samples, samples, self.shape(), drawing.classes, stand_in, slow=True)
        return self.with_cache(replace(facts, attention=self._shuffled()))

    def prepare(self, facts: Facts, progress: OnProgress) -> Facts:
        self._draw(progress)
        return super().prepare(facts, progress)

    def listings(self, facts: Facts) -> tuple[Listing, ...]:
        root = drawn_folder(self._drawing())
        classes = class_folders(root / "train")
        limits = Limits.of(self.options)
        train, val = (folder_of_classes(root / split, classes, limits) for split in ("train", "val"))
        return self._ordered(replace(train, root=str(root)), "embedded"), replace(val, root=str(root))

    def _shuffled(self) -> str:
        """The sentence about a fixed shuffle in place of the archive's order; '' if there is none."""
        archive = self._archive()
        if self.options.order == "listed" or (archive is not None and archive.is_file()):
            return ""
        missing = "drawn flowers have no archive" if archive is None else f"{archive} is not there"
        return f"data.order=archive: {missing}, so the training images come in one fixed shuffle instead of its order"

    def _archive(self) -> Path | None:
        """The archive that the images come from; drawn ones come from none."""
        return None

    def _ordered(self, train: Listing, kind: str) -> Listing:
        """The training images in the order of ``data.order``.

        ``setid.mat`` lists them class by class, and the drawn ones lie in folders of classes. In that order without a
        shuffle a model sees one class at a time.
        """
        if self.options.order == "listed":
            return train
        order = np.random.default_rng(0).permutation(len(train))
        archive = self._archive() if kind == "real" else None
        if archive is not None and archive.is_file():
            places = prepare_once(cache_folder("flowers-order", [archive]), lambda folder: _members(archive))
            place = dict(zip(places["names"], range(len(places["names"])), strict=True))
            names = [Path(train.files[file]).name for file in train.file]
            if lacks := [name for name in names if name not in place]:
                raise _no_order(archive, f"lacks {len(lacks)} of {len(names)} training images: {some(lacks)}")
            order = np.array(sorted(range(len(train)), key=lambda n: place[names[n]]))
        return replace(train.subset(order), number=train.number)

    def _drawing(self) -> Drawing:
        return Drawing(EmbeddedFlowersData.draw_seed, EmbeddedFlowersData.per_class, EmbeddedFlowersData.drawn_size)

    def _draw(self, progress: OnProgress) -> None:
        draw(self._drawing(), on_progress=partial(progress, "drawing the embedded flowers"))


class EmbeddedFlowers(DrawnFlowers):
    """data=embedded_flowers: the drawn flowers, chosen by the user."""

    Options = EmbeddedFlowersData
    options: EmbeddedFlowersData

    def facts(self, global_batch_size: int) -> Facts:
        if (split := self.options.train_split) != "trnid":
            raise UserError(
                f"data.train_split={split}",
                "the drawn flowers have one part to train on and one for validation, not Oxford's three lists",
                f"data.train_split=trnid, or data=flowers102 data.train_split={split}",
            )
        facts, names = self._embedded(""), self._names()
        return facts if names is None else replace(facts, classes=len(names), task=TASKS[self.options.labels])

    def class_names(self, facts: Facts) -> list[str]:
        """The names of the classes, of the numbers, or of the traits."""
        return super().class_names(facts) if (names := self._names()) is None else names

    def fingerprint(self, facts: Facts) -> str:
        whole, labels = super().fingerprint(facts), self.options.labels
        return whole if labels == "class" else digest_of(whole, labels)

    def open(self, facts: Facts) -> Splits:
        splits, labels, classes = super().open(facts), self.options.labels, self._drawing().classes
        if labels == "class":
            return splits
        import torch

        by_class = torch.tensor(colours(classes) if labels == "colour" else traits(classes), dtype=torch.float32)
        for split in (splits.train, splits.val):
            split.labels = by_class[split.labels]  # type: ignore[union-attr]
        return splits

    def _names(self) -> list[str] | None:
        """The names of what is learnt instead of the class; None: the class."""
        return {"colour": ["red", "green", "blue"], "traits": trait_names()}.get(self.options.labels)

    def _drawing(self) -> Drawing:
        options = self.options
        classes = min(options.species or options.num_classes or CLASSES, CLASSES)
        return Drawing(options.draw_seed, options.per_class, options.drawn_size, classes)


class Flowers102(DrawnFlowers):
    """data=flowers102: Oxford Flowers-102, read by torchvision; if it cannot be had, the drawn flowers.
    Or a refusal, as ``data.on_missing`` says."""

    Options = Flowers102Data
    options: Flowers102Data

    def facts(self, global_batch_size: int) -> Facts:
        if self._present():
            listings = self._real()
            facts = self._facts(f"{SITE.name} in {self.options.root}", "real", *map(len, listings))
            return self.with_cache(replace(facts, attention=self._shuffled()), listings)
        partial = self._folder()
        if partial.is_dir() and not self.options.download:
            raise UserError(
                f"data.root={self.options.root}",
                f"{partial} is there but lacks jpg/, imagelabels.mat or setid.mat",
                "data.download=true, or data=embedded_flowers",
            )
        if reason := absent(self.options, SITE, partial):
            return self._instead(reason)
        trained, held_out, test = PARTS[self.options.train_split]
        samples = sum(SIZES[name] for name in trained)
        where = f"{SITE.name}, to be downloaded into {self.options.root}"
        return self.with_cache(self._facts(where, "download", samples, SIZES[held_out], SIZES.get(test, 0)))

    def _facts(self, source: str, kind: str, train: int, val: int, test: int = 0) -> Facts:
        trained, held_out, left = PARTS[self.options.train_split]
        on = f"{held_out}, the set's test images, as in the reference" if held_out == "tstid" else held_out
        lists = f"trained on {' and '.join(trained)}, validated on {on}" + (f", tested on {left}" if test else "")
        return Facts(source, kind, train, val, self.shape(), CLASSES, slow=True, test_samples=test, splits=lists)

    def _instead(self, reason: str) -> Facts:
        split = self.options.train_split
        without = "" if split == "trnid" else f" (they have no {split}: the part to train on is as large as trnid)"
        return self._embedded(SITE.stand_in(reason, f"The embedded drawn flowers are used{without}"))

    def class_names(self, facts: Facts) -> list[str]:
        if facts.kind == "embedded":
            return super().class_names(facts)
        from torchvision.datasets import Flowers102 as Real

        return list(Real.classes)

    def fingerprint(self, facts: Facts) -> str:
        if facts.kind == "download":  # mode=predict looks at other files, and fetches nothing
            return DataSource.fingerprint(self, facts)
        return super().fingerprint(facts) if facts.kind == "embedded" else ImageSource.fingerprint(self, facts)

    def prepare(self, facts: Facts, progress: OnProgress) -> Facts:
        if facts.kind == "download":
            facts = self._download()
        if facts.kind == "embedded":
            self._draw(progress)
        return ImageSource.prepare(self, facts, progress)

    def _download(self) -> Facts:
        if reason := fetch(self.options, SITE, self._present):
            return self._instead(reason)
        real = self.facts(0)
        return real if real.kind == "real" else self._instead("the download is incomplete")

    def listings(self, facts: Facts) -> tuple[Listing, ...]:
        if facts.kind == "download":
            raise FileNotFoundError(errno.ENOENT, "is still to be downloaded", str(self._folder()))
        if facts.kind == "embedded":
            return super().listings(facts)
        train, *others = self._real()
        return self._ordered(train, facts.kind), *others

    def _real(self) -> tuple[Listing, ...]:
        """The set's own lists of images and labels: of training, validation, and test where a list is left.

        Raises:
            UserError: one is damaged, or they do not fit one another.
        """
        labels = self._lists("imagelabels.mat", "labels")[0]
        trained, held_out, left = PARTS[self.options.train_split]
        *lists, val = self._lists("setid.mat", *trained, held_out)
        numbers = [np.concatenate(lists), val, *(self._lists("setid.mat", left) if left and self._has(left) else ())]
        wrong = np.flatnonzero((labels < 1) | (labels > CLASSES))
        if len(wrong):
            raise self._wrong(
                f"imagelabels.mat: {len(wrong)} of {len(labels)} labels are not 1 to {CLASSES}; the first is "
                f"{labels[wrong[0]]}, of image {wrong[0] + 1}"
            )
        for listed in numbers:
            if not len(listed) or listed.min() < 1 or listed.max() > len(labels):
                raise self._wrong(f"setid.mat lists images that imagelabels.mat does not have, which has {len(labels)}")
        return tuple(self._listed(listed, labels) for listed in numbers)

    def _has(self, name: str) -> bool:
        """Whether ``setid.mat``, which is whole, has this list."""
        limits = Limits.of(self.options)
        return name in arrays(read_regular(self._folder() / "setid.mat", limits), limits.file_bytes)

    def _lists(self, file: str, *names: str) -> list[np.ndarray]:
        """The whole numbers of these names in a file.

        Raises:
            UserError: it does not hold them.
        """
        limits = Limits.of(self.options)
        try:
            found = arrays(read_regular(self._folder() / file, limits), limits.file_bytes)
        except (NotMatlab, OSError) as error:
            raise self._wrong(f"{file} is damaged: {why(error)}") from error
        if lacks := [name for name in names if name not in found]:
            raise self._wrong(f"{file} lacks {lacks[0]!r}")
        for name in names:
            if not np.isfinite(found[name]).all() or np.any(found[name] != np.floor(found[name])):
                raise self._wrong(f"{file}: {name!r} has numbers that are not whole")
        return [found[name].ravel().astype(np.int64) for name in names]

    def _wrong(self, reason: str) -> UserError:
        return UserError(f"data.root={self.options.root}", f"{self._folder()}: {reason}", "fetch it anew")

    def _listed(self, numbers: np.ndarray, labels: np.ndarray) -> Listing:
        """Images are numbered from 1, and so are their classes."""
        paths = [str(self._folder() / "jpg" / f"image_{number:05d}.jpg") for number in numbers.tolist()]
        listing = Listing.of_files(paths, labels[numbers - 1] - 1, Limits.of(self.options))
        return replace(listing, root=str(self._folder()))

    def _folder(self) -> Path:
        return Path(self.options.root) / "flowers-102"

    def _archive(self) -> Path | None:
        return self._folder() / SITE.files[0].name

    def _present(self) -> bool:
        folder = self._folder()
        return (
            all((folder / f).is_file() for f in ("imagelabels.mat", "setid.mat"))
            and next((folder / "jpg").glob("*.jpg"), None) is not None
        )


def _members(archive: Path) -> dict[str, list[str]]:
    """The names of an archive's images, in its order.

    Raises:
        UserError: the archive is damaged, cut off, or something else.
    """
    try:
        with open_regular(archive) as file, tarfile.open(fileobj=file, mode="r|*") as members:
            return {"names": [Path(member.name).name for member in members if member.name.endswith(".jpg")]}
    except (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
        raise _no_order(archive, f"cannot be read ({why(error)})") from error


def _no_order(archive: Path, reason: str) -> UserError:
    """The error for an archive that does not tell the order of the images."""
    return UserError("data.order=archive", f"{archive} {reason}", "data.order=listed, or fetch the archive anew")
