"""data=imagefolder: a folder of class folders of images, as torchvision's ImageFolder reads it."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.config.schema import ImageFolderData
from trainer.data.images.folder_layout import FolderLayout, depth_said, folder_layout
from trainer.data.images.image_files import EXTENSIONS
from trainer.data.images.listing import Listing, folder_of_classes
from trainer.data.images.source import ImageSource
from trainer.data.images.split_checks import attention, refuse_empty_folders
from trainer.data.limits import Limits
from trainer.data.remote_files import local_folder
from trainer.data.source import Facts, held_out
from trainer.errors import UserError
from trainer.visible import one_line
from trainer.wording import some


class ImageFolder(ImageSource):
    """data=imagefolder: ``root/train/CLASS/...`` and ``root/val/CLASS/...``, or ``root/CLASS/...`` split by a seed."""

    Options = ImageFolderData
    options: ImageFolderData

    def facts(self, global_batch_size: int) -> Facts:
        root = self._root
        if root.is_file():
            raise UserError(
                f"data.root={root}",
                "is a file and no folder; an archive is not read",
                "data.root=FOLDER with what it holds, unpacked",
            )
        if not root.is_dir():
            raise _no_such_folder("data.root", root, "class folders of images, or train/ and val/ with such folders")
        if self.options.val and not (root / self.options.val).is_dir():
            raise _no_such_folder("data.val", self.options.val, f"the validation images, in {root}")
        layout = self._layout()
        listings = self._found()
        for split, listing in zip(("training", "validation", "test"), listings, strict=False):
            if listing.missing and self.options.on_bad == "error":
                raise UserError(
                    f"data.root={root}",
                    (
                        f"{len(listing.missing)} of its {split} images "
                        f"{'is a link that leads' if len(listing.missing) == 1 else 'are links that lead'} "
                        f"nowhere: {some(list(listing.missing))}"
                    ),
                    "data.on_bad=skip, or repair them",
                )
            if not len(listing):
                raise UserError(
                    f"data.root={root}",
                    f"holds no {split} images ({', '.join(EXTENSIONS)}){''.join(f'. {said}' for said in listing.said)}",
                )
        source = f"images in {one_line(str(root))}"
        facts = self.facts_of(source, "folder", listings, len(layout.classes), self._splits_in_words(layout))
        names = self.class_names(facts)
        refuse_empty_folders(f"data.root={one_line(str(root))}", listings[0], names)
        splits = [facts.splits] if layout.test and not layout.val else []
        odd = attention(listings, names, [*layout.said, *depth_said(layout, listings[0].files), *splits])
        return self.with_cache(replace(facts, attention=odd), listings)

    def listings(self, facts: Facts) -> tuple[Listing, ...]:
        return self._found()

    def _layout(self) -> FolderLayout:
        return folder_layout(self._root, self.options.val)

    @cached_property
    def _root(self) -> Path:
        """The folder on this machine."""
        return Path(local_folder(self.options.root, "data.root"))

    def _splits_in_words(self, layout: FolderLayout) -> str:
        """Where validation and test images come from, for the plan."""
        options, test = self.options, "" if layout.test is None else f", the test in {one_line(layout.test.name)}/"
        if layout.val is not None:
            return f"validation is in {one_line(os.path.relpath(layout.val, layout.root))}/{test}"
        return held_out(options, f"each class in {one_line(str(layout.train))}") + test

    def _found(self) -> tuple[Listing, ...]:
        layout, limits = self._layout(), Limits.of(self.options)
        classes = list(layout.classes)
        train, val, test = (
            None if place is None else replace(folder_of_classes(place, classes, limits), root=str(self._root))
            for place in (layout.train, layout.val, layout.test)
        )
        assert train is not None
        learnt = (train, val) if val is not None else train.split(self.options.val_fraction, self.options.split_seed)
        return learnt if test is None else (*learnt, test)

    def class_names(self, facts: Facts) -> list[str]:
        """The names of the classes, which are those of their folders."""
        return [one_line(name) for name in self._layout().classes]


def _no_such_folder(key: str, folder: Any, what: str) -> UserError:
    """The error for an image folder that is not where the config says."""
    return UserError(f"{key}={folder}", f"there is no such folder, which should hold {what}", f"{key}=FOLDER")
