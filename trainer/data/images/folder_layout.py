"""Finds the splits and classes of a folder of images, and refuses a folder whose layout is another one."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.data.folder_walk import is_hidden
from trainer.data.images.image_files import is_image
from trainer.data.images.listing import class_folders
from trainer.data.images.split_folders import SplitFolders, split_folders
from trainer.errors import UserError
from trainer.visible import one_line
from trainer.wording import counted, some, typed

TABLES = (".csv", ".tsv", ".json", ".jsonl", ".xlsx", ".xls", ".parquet", ".txt", ".mat")
"""Suffixes of files that may say which image has which label."""


NO_CLASSES = set(
    """
    image images img imgs jpg jpeg jpegimages png photos pictures pics frames mask masks label labels annotations
    bbox
    """.split()
)
"""Names of folders that hold all images, or what belongs to them, and are hardly classes."""


@dataclass(frozen=True)
class FolderLayout:
    """Where the images of each split lie.

    Attributes:
        root: the user's folder.
        train: holds a folder for each class; ``root`` itself where it has no folders of splits.
        val: the folder of validation images; None: a part of the training images.
        test: the folder of test images with classes; None: there is none.
        classes: the names of the folders in ``train``, each a class.
        said: sentences about what lies beside these folders and is not used.
    """

    root: Path
    train: Path
    val: Path | None
    test: Path | None
    classes: tuple[str, ...]
    said: tuple[str, ...] = ()


def folder_layout(root: Path, val: str | None) -> FolderLayout:
    """Find the splits and the classes in a folder of images.

    Args:
        val: the validation folder that the user has named.

    Raises:
        UserError: the folder has another layout: no classes, one class, splits without training images, classes of
            validation that training does not have.
    """
    what, names = f"data.root={one_line(str(root))}", class_folders(root)
    found = split_folders(names, what, val or "")
    if not _are_splits(root, found):
        _refuse_without_train(root, what, found, val)
        found = SplitFolders(val=val or "")
    train = root / found.train
    classes = tuple(name for name in class_folders(train) if found.train or name != val)
    _refuse_other_layouts(what, root, train, classes)
    said = list(_strange_names(root, train, classes))
    held, test = (root / name if name else None for name in (found.val, found.test))
    for folder in (held, test):
        if folder is not None and (folder == held or set(class_folders(folder)) & set(classes)):
            _refuse_strange_classes(what, train, folder, classes)
    said += [*_beside(root, found), *_without_class(train)]
    if test is not None and not set(class_folders(test)) & set(classes):
        instead = "" if held else ": a part of the training images is held out for validation"
        said.append(f"{_shown(test)} has no folders of these classes, and is not used{instead}")
        test = None
    elif test is not None:
        _refuse_strange_classes(what, train, test, classes)
    return FolderLayout(root, train, held, test, classes, tuple(said))


def _are_splits(root: Path, found: SplitFolders) -> bool:
    """Whether folders that are called as splits are splits: a class may be called ``train`` as well."""
    return bool(found.train) and bool(class_folders(root / found.train) or found.val or found.test or not found.others)


def _refuse_without_train(root: Path, what: str, found: SplitFolders, val: str | None) -> None:
    """Refuse folders of splits of which none is for training: they would be taken for classes."""
    splits = [name for name in (found.val, found.test) if name and name != val and class_folders(root / name)]
    if splits and not found.train:
        raise UserError(
            what,
            f"holds {some([one_line(name) for name in splits])}, and no folder of training images",
            "call that one train",
        )


def _refuse_other_layouts(what: str, root: Path, train: Path, classes: tuple[str, ...]) -> None:
    """Refuse a folder without class folders, or with a single one: whatever is learnt, accuracy would be 1."""
    if len(classes) > 1:
        return
    tables = _tables(root, train)
    if not classes:
        flat = sum(map(is_image, _files(train)))
        images = f", but {counted(flat, 'image')} that belong to no class" if flat else ""
        raise UserError(
            what,
            f"{_shown(train)} has no folders, of which each is a class{images}{tables}",
            "put the images into a folder for each class",
        )
    only = train / classes[0]
    deeper = [one_line(name) for name in class_folders(only)]
    inside = f". That folder has others in it ({some(deeper)})" if deeper else ""
    instead = "at least two folders, each a class"
    if deeper:
        instead = typed("data.root", only) if train == root else f"folders of classes in {_shown(train)} itself"
    raise UserError(
        what,
        f"{_shown(train)} has a single class, {one_line(only.name)}, of which any model is right{inside}{tables}",
        instead,
    )


def _tables(root: Path, train: Path) -> str:
    """A sentence about files that may say which image has which label."""
    found = {one_line(name) for place in (root, train) for name in _files(place) if name.lower().endswith(TABLES)}
    return f". A table of labels is not read ({some(sorted(found))})" if found else ""


def _strange_names(root: Path, train: Path, classes: tuple[str, ...]) -> Iterator[str]:
    """Sentences about folders that are hardly classes, by their names."""
    if strange := [one_line(name) for name in classes if name.lower() in NO_CLASSES]:
        yield f"the folder {some(strange)} in {_shown(train)} counts as a class{_tables(root, train)}"
    by_letters: dict[str, list[str]] = {}
    for name in classes:
        by_letters.setdefault(_folded(name), []).append(one_line(name))
    if alike := [" and ".join(names) for names in by_letters.values() if len(names) > 1 and len(names[0]) > 1]:
        yield f"classes differ in capitals or in how accents are written: {some(alike)}"


def depth_said(layout: FolderLayout, files: Sequence[str]) -> list[str]:
    """A sentence where no training image lies directly in a class folder: the classes may be a level deeper."""
    direct = {os.path.join(layout.train, name) for name in layout.classes}
    below = {os.path.dirname(file) for file in files}
    if not below or below & direct:
        return []
    names = sorted(one_line(os.path.relpath(folder, layout.train)) for folder in below)
    return [
        (
            f"no image lies directly in a class folder, but deeper ({some(names)}); if those are the classes, "
            f"move them up to {_shown(layout.train)}"
        )
    ]


def _refuse_strange_classes(what: str, train: Path, val: Path, classes: tuple[str, ...]) -> None:
    found = class_folders(val)
    if not found:
        raise UserError(
            what,
            f"{_shown(val)} has no folders, of which each is a class",
            "folders of classes in it, or remove it to hold out a part of the training images",
        )
    strange = [name for name in found if name not in classes]
    if not strange:
        return
    same = {_folded(name): name for name in classes}
    near = [f"{one_line(name)} (there {one_line(same[_folded(name)])})" for name in strange if _folded(name) in same]
    how = f". They differ in capitals or in how accents are written: {some(near)}" if near else ""
    raise UserError(
        what,
        (
            f"{_shown(val)} has classes that {_shown(train)} does not have: "
            f"{some([one_line(name) for name in strange])}{how}"
        ),
        "remove or rename these folders",
    )


def _folded(name: str) -> str:
    """A name without the differences of capitals, accents' encodings and outer spaces."""
    return unicodedata.normalize("NFC", name).casefold().strip()


def _beside(root: Path, found: SplitFolders) -> Iterator[str]:
    """Sentences about what lies beside the folders of splits and is not used."""
    if found.train:
        others = [_shown(root / name) for name in found.others if _holds_images(root / name)]
        if others:
            yield f"{some(others)}: no folder of a split, and not used"
        yield from _without_class(root)


def _without_class(folder: Path) -> Iterator[str]:
    """A sentence about images that lie beside the class folders."""
    if flat := sum(map(is_image, _files(folder))):
        yield (
            f"{counted(flat, 'image')} directly in {_shown(folder)} {'is' if flat == 1 else 'are'} of no class, "
            f"and not used"
        )


def _holds_images(folder: Path) -> bool:
    return any(is_image(name) for _, _, names in os.walk(folder) for name in names)


def _files(folder: Path) -> list[str]:
    """The names of the files directly in a folder that are not hidden."""
    return [entry.name for entry in os.scandir(folder) if not is_hidden(entry.name) and entry.is_file()]


def _shown(path: Path) -> str:
    return one_line(str(path))
