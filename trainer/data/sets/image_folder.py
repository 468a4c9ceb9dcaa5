"""data=imagefolder: a folder of class folders of images, as torchvision's ImageFolder reads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.config.schema import ImageFolderData
from trainer.data.images.listing import EXTENSIONS, Listing, class_folders, folder_of_classes
from trainer.data.images.source import ImageSource
from trainer.data.images.split_checks import attention, refuse_untrained
from trainer.data.limits import Limits
from trainer.data.source import Facts
from trainer.errors import UserError
from trainer.visible import one_line
from trainer.wording import some

VALIDATION = ("val", "valid", "validation", "test")


class ImageFolder(ImageSource):
    """data=imagefolder: ``root/train/CLASS/...`` and ``root/val/CLASS/...``, or ``root/CLASS/...`` split by a seed."""

    Options = ImageFolderData
    options: ImageFolderData

    def facts(self, global_batch_size: int) -> Facts:
        root = Path(self.options.root)
        if not root.is_dir():
            raise _no_such_folder("data.root", root, "class folders of images, or train/ and val/ with such folders")
        classes = self._classes()
        train, val = self._found()
        for split, listing in (("training", train), ("validation", val)):
            if listing.missing and self.options.on_bad == "error":
                raise UserError(f"data.root={root}", f"{len(listing.missing)} of its {split} images {'is a link that leads' if len(listing.missing) == 1 else 'are links that lead'} nowhere: {some(list(listing.missing))}", "data.on_bad=skip, or repair them")  # fmt: skip
            if not len(listing):
                raise UserError(f"data.root={root}", f"holds no {split} images ({', '.join(EXTENSIONS)})")
        source = f"images in {one_line(str(root))}"
        facts = Facts(source, "folder", len(train), len(val), self.shape(), len(classes), slow=True)
        names = self.class_names(facts)
        refuse_untrained(f"data.root={one_line(str(root))}", train, val, names, folders=True)
        facts = replace(facts, attention=attention(train, val, names))
        return self.sized(facts, (train, val))

    def listings(self, facts: Facts) -> tuple[Listing, Listing]:
        return self._found()

    def _train_folder(self) -> Path:
        root = Path(self.options.root)
        return root / "train" if (root / "train").is_dir() else root

    def _val_folder(self) -> Path | None:
        """The folder of validation images; None: a part of the training images."""
        root = Path(self.options.root)
        if self.options.val:
            named = root / str(self.options.val)
            if not named.is_dir():
                raise _no_such_folder("data.val", self.options.val, f"the validation images, in {root}")
            return named
        if self._train_folder() == root:
            return None
        return next((root / name for name in VALIDATION if (root / name).is_dir()), None)

    def _classes(self) -> list[str]:
        """The classes of the training images; those of validation must be among them."""
        folder = self._train_folder()
        classes = class_folders(folder)
        if not classes:
            raise UserError(f"data.root={self.options.root}", f"{folder} has no folders, of which each is a class")
        val = self._val_folder()
        strange = [name for name in class_folders(val) if name not in classes] if val else []
        if strange:
            raise UserError(
                f"data.root={self.options.root}",
                f"{val} has classes that {folder} does not have: {', '.join(strange[:5])}",
                "remove or rename these folders",
            )
        return classes

    def _found(self) -> tuple[Listing, Listing]:
        classes = self._classes()
        limits = Limits.of(self.options)
        train = folder_of_classes(self._train_folder(), classes, limits)
        folder = self._val_folder()
        if folder is not None:
            return train, folder_of_classes(folder, classes, limits)
        return train.split(self.options.val_fraction, self.options.split_seed)

    def class_names(self, facts: Facts) -> list[str]:
        """The names of the classes, which are those of their folders."""
        return [one_line(name) for name in self._classes()]


def _no_such_folder(key: str, folder: Any, what: str) -> UserError:
    """The error for an image folder that is not where the config says."""
    return UserError(f"{key}={folder}", f"there is no such folder, which should hold {what}", f"{key}=FOLDER")
