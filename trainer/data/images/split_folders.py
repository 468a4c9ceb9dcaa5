"""Decides by their names which folders of a data set hold its training, validation and test images."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer.errors import UserError
from trainer.visible import one_line
from trainer.wording import some, typed

FORMS = {
    "train": ("train", "training", "trn"),
    "val": ("val", "valid", "validation", "validate", "dev", "devel", "development", "eval", "evaluation"),
    "test": ("test", "testing", "tst"),
    "holdout": ("holdout", "heldout"),
}
"""Split -> what people call its folder. A holdout is for the test, or for validation where another folder is for the
test."""
FILLERS = ("set", "data", "dataset", "split", "image", "images", "img", "imgs", "folder")
"""Words beside a split's name that say nothing about the split: ``train_images``, ``testset``."""
NUMBER = re.compile(r"^\d+(?=[-_. ])|(?<!\d)(19|20)\d\d(?!\d)")
"""A number that orders folders (``1_train``), or a year (``val2017``)."""


@dataclass(frozen=True)
class SplitFolders:
    """The names of the folders of a data set's splits.

    Attributes:
        train, val, test: '' where no folder has such a name.
        others: names that mean no split.
    """

    train: str = ""
    val: str = ""
    test: str = ""
    others: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether any name means a split."""
        return bool(self.train or self.val or self.test)


def split_folders(names: Iterable[str], what: str, val: str = "") -> SplitFolders:
    """Decide by their names, in any case, which of these folders are for training, validation and test.

    ``Train``, ``training_set``, ``1_train`` and ``train2017`` all mean training. Words in common are no hindrance:
    ``birds_train`` and ``birds_test`` are splits.

    Args:
        what: the key and its value, for a refusal.
        val: the folder that the user has named for validation; it means nothing else, and no other means validation.

    Raises:
        UserError: two folders mean the same split.
    """
    names = sorted(names)
    roles: dict[str, list[str]] = {"train": [], "val": [val] if val else [], "test": []}
    meant = {name: split for name, split in _meant(names).items() if name != val}
    for name, split in meant.items():
        if split != "holdout" and not (val and split == "val"):
            roles[split].append(name)
    for name in (name for name, split in meant.items() if split == "holdout"):
        roles["val" if roles["test"] and not roles["val"] else "test"].append(name)
    for split, found in roles.items():
        if len(found) > 1:
            called = some([one_line(name) for name in found])
            raise UserError(
                what,
                f"has several folders that mean {split}: {called}",
                typed("data.val", found[0]) if split == "val" else "rename all but one of them",
            )
    train, held, test = ("".join(found) for found in roles.values())
    return SplitFolders(train, held, test, tuple(name for name in names if name not in (train, held, test)))


def _meant(names: Sequence[str]) -> dict[str, str]:
    """Name -> the split that it means, or ``holdout``; names that mean none are left out."""
    by_rest: dict[tuple[str, ...], dict[str, str]] = {}
    for name in names:
        split, rest = _read(name)
        if split:
            by_rest.setdefault(rest, {})[name] = split
    plain = by_rest.pop((), {})
    if "train" in plain.values():
        return plain
    together = [found for found in by_rest.values() if "train" in found.values() and len(set(found.values())) > 1]
    return together[0] if together else plain


def _read(name: str) -> tuple[str, tuple[str, ...]]:
    """The split that a name means ('': none), and the words beside it."""
    text = re.sub(r"(?<=hold|held)[-_. ]+(?=out)", "", NUMBER.sub("", name.casefold()))
    words = [word for word in re.split(r"[^\w]+|_+", text) if word]
    splits, rest = [], []
    for word in words:
        if split := _split_of(word):
            splits.append(split)
        elif word not in FILLERS:
            rest.append(word)
    return (splits[0], tuple(rest)) if len(splits) == 1 else ("", ())


def held_out_split(name: str) -> str:
    """Which of ``val`` and ``test`` a name alone means, whatever other names there are; '': none of them."""
    split = _read(name)[0]
    return {"val": "val", "test": "test", "holdout": "test"}.get(split, "")


def split_named(name: str) -> str:
    """Which of ``train``, ``val`` and ``test`` a name means; '': none of them."""
    return "train" if _read(name)[0] == "train" else held_out_split(name)


def _split_of(word: str) -> str:
    """The split that a word means, such as ``training`` or ``trainset``; '': none."""
    stems = {word, *(word.removesuffix(filler) for filler in FILLERS)}
    return next((split for split, forms in FORMS.items() if stems & set(forms)), "")
