"""Checks the splits of image data: refuses classes without training images, warns of images in both splits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np

from trainer.data.images.listing import Listing
from trainer.errors import UserError
from trainer.visible import one_line
from trainer.wording import some

COMPARED, CANDIDATES = 64, 64
"""Validation images that are compared with training images, and training images of the same size for each."""
HEAD = 4096
"""Bytes that are compared first."""


def _empty_classes(listing: Listing, names: Sequence[str]) -> list[str]:
    """The names of the classes that have no image in a split; none where labels are no classes."""
    if not names:
        return []
    return [names[n] for n in np.flatnonzero(np.bincount(listing.labels, minlength=len(names)) == 0).tolist()]


def refuse_empty_folders(what: str, train: Listing, names: Sequence[str]) -> None:
    """Refuse folders of classes of which some have no training images.

    Raises:
        UserError: some have none.
    """
    if untrained := _empty_classes(train, names):
        others = [*train.said, *train.passed_over]
        why = f" ({some(others)})" if others else ""
        raise UserError(
            what,
            f"{len(untrained)} of {len(names)} classes have no training images: {some(untrained)}{why}",
            "put images into these folders, or remove them",
        )


def refuse_untrained(what: str, listings: Sequence[Listing], names: Sequence[str]) -> None:
    """Refuse data with a class that has validation or test images but no training images.

    Raises:
        UserError: some have none.
    """
    train, *others = listings
    for which, listing in zip(("validation", "test"), others, strict=False):
        absent = set(_empty_classes(listing, names))
        if untrained := [name for name in _empty_classes(train, names) if name not in absent]:
            count = f"{len(untrained)} class{'es are' if len(untrained) > 1 else ' is'}"
            raise UserError(what, f"{count} in the {which} images and not in the training images: {some(untrained)}")


def refuse_one_label(what: str, train: Listing) -> None:
    """Refuse training samples that all have one label: any model is right, and accuracy is 1 whatever is learnt.

    Raises:
        UserError: they do.
    """
    if len(labels := np.unique(train.labels)) == 1:
        raise UserError(
            what,
            f"all {len(train):,} training samples have the label {labels[0]}, so that any model is right",
            "samples of at least two classes",
        )


def unused_labels(train: Listing, val: Listing, classes: int) -> list[str]:
    """A sentence about labels below ``classes`` that no sample has, such as 0 where labels begin with 1."""
    counts = np.bincount(np.concatenate([train.labels, val.labels]), minlength=classes)
    unused = [str(label) for label in np.flatnonzero(counts == 0).tolist()]
    first = " (labels begin with 0)" if counts[0] == 0 else ""
    return [f"{len(unused)} of {classes} labels are of no sample: {some(unused)}{first}"] if unused else []


def attention(
    listings: Sequence[Listing], names: Sequence[str], layout: Sequence[str] = (), labels: Sequence[str] = ()
) -> str:
    """Return a warning about splits of images that are odd but usable, or ''.

    Args:
        listings: of training, validation, and test where there is one.
        layout: sentences about what else is in the data's folder; labels: about labels.
    """
    train, val, *tests = listings
    leaks = [text for test in tests if (text := _leaks(test, {"training": train, "validation": val}))]
    said = [*layout, *leaks, *labels, *dict.fromkeys([*train.said, *val.said])]
    if passed := list(dict.fromkeys([*train.passed_over, *val.passed_over])):
        said.append(f"{len(passed)} name{'s are' if len(passed) > 1 else ' is'} passed over: {some(passed)}")
    if missing := list(dict.fromkeys([*train.missing, *val.missing])):
        what = "images are links that lead" if len(missing) > 1 else "image is a link that leads"
        said.append(f"{len(missing)} {what} nowhere: {some(missing)}")
    if unseen := _empty_classes(val, names):
        said.append(f"{len(unseen)} of {len(names)} classes have no validation images: {some(unseen)}")
    if both := _in_both(train, val):
        said.append(f"{len(both)} of {len(val)} validation images are training images as well: {some(both)}")
    return ". ".join([*said, *_copies_said("validation", val, "training", train)])


def _copies_said(name: str, val: Listing, other: str, train: Listing) -> Iterator[str]:
    """A sentence about images of a split (``name``) whose bytes are those of another split's images."""
    if copies := _copies(train, val):
        compared = min(COMPARED, len(val))
        which = f"{name} images" if compared == len(val) else f"{name} images that were compared, of {len(val):,},"
        yield f"{len(copies)} of {compared} {which} are copies of {other} images: {some(copies)}"


def _copies(train: Listing, val: Listing) -> list[str]:
    """A sentence for each of some validation images whose bytes are those of a training image."""
    by_size: dict[int, list[int]] = {}
    for number, size in enumerate(_sizes(train)):
        by_size.setdefault(size, []).append(number)
    sizes, found = _sizes(val), []
    for number in np.unique(np.linspace(0, len(val) - 1, COMPARED).astype(int)).tolist() if len(val) else []:
        alike = by_size.get(sizes[number], [])[:CANDIDATES]
        if (first := next((n for n in alike if _same(train, n, val, number)), None)) is not None:
            found.append(f"{val.short_name(number)} is {train.short_name(first)}")
    return found


def _same(train: Listing, one: int, val: Listing, other: int) -> bool:
    """Whether two images of the same size have the same bytes; False for two names of one file (``_in_both``)."""
    place, there = (
        (train.files[train.file[one]], train.spans[one, 0]),
        (val.files[val.file[other]], val.spans[other, 0]),
    )
    if place == there or (os.path.samefile(place[0], there[0]) and place[1] == there[1]):
        return False
    try:
        return train.read(one, HEAD) == val.read(other, HEAD) and train.read(one) == val.read(other)
    except OSError:  # it is named where it is decoded
        return False


def _sizes(listing: Listing) -> list[int]:
    """The bytes of each image."""
    lengths = listing.spans[:, 1].tolist()
    return [
        os.stat(listing.files[file]).st_size if n < 0 else n
        for file, n in zip(listing.file.tolist(), lengths, strict=True)
    ]


def _leaks(test: Listing, others: dict[str, Listing]) -> str:
    """Return a warning about test images that are training or validation images as well, or copies of these, or ''.

    Args:
        others: name of another split -> its images.
    """
    said: list[str] = []
    for name, listing in others.items():
        if both := _in_both(listing, test):
            said.append(f"{len(both)} of {len(test)} test images are {name} images as well: {some(both)}")
        said += _copies_said("test", test, name, listing)
    return ". ".join(said)


def _in_both(train: Listing, val: Listing) -> list[str]:
    """A sentence for each validation image that is also a training image under another name, e.g. through a link."""
    if not (train.linked or val.linked):
        return []
    known = {identity: path for path, identity in _identities(train)}
    found = ((path, known.get(identity)) for path, identity in _identities(val))
    return [f"{one_line(path)} is {one_line(first)}" for path, first in found if first]


def _identities(listing: Listing) -> Iterator[tuple[str, tuple[int, int]]]:
    """The files that hold the images of a split; of a listing that was divided its own alone."""
    for path in (listing.files[number] for number in listing.file.tolist()):
        about = os.stat(path)
        yield path, (about.st_dev, about.st_ino)
