"""Folders of images as people have them: which folders are splits and classes, and which files are images."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest

from tests.pictures import config, encoded, picture
from trainer.config import schema
from trainer.data.images.decode import decode
from trainer.data.images.header import BadImage
from trainer.data.images.image_files import EXTENSIONS, HEIC, JPEG, UNREAD
from trainer.data.images.listing import images_in
from trainer.data.sets.image_folder import ImageFolder
from trainer.data.source import Facts
from trainer.errors import UserError

JPEG_BYTES = encoded(picture(0, 0, 4, 4))
PNG_BYTES = encoded(picture(0, 0, 4, 4), "PNG")
AVIF_BYTES = encoded(picture(0, 0, 16, 16), "AVIF")
HEIC_BYTES = b"\0\0\0\x18ftypheic" + bytes(200)
APPLE_DOUBLE = b"\0\5\x16\7\0\2\0\0Mac OS X        " + bytes(200)


def put(root: Path, *names: str, content: bytes | None = None) -> None:
    """Write files; without contents each is another image: what follows a JPEG is no part of it."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(JPEG_BYTES + str(path).encode() if content is None else content)


def classes(root: Path, *names: str, count: int = 4) -> Path:
    put(root, *(f"{name}/{n}.jpg" for name in names for n in range(count)))
    return root


def source(root: Path, **options: Any) -> ImageFolder:
    return ImageFolder(**config(schema.ImageFolderData, root=str(root), image_size=32, **{"cache": "none", **options}))


def facts(root: Path, **options: Any) -> Facts:
    return source(root, **options).facts(1)


SPLITS = [
    ("train val", 2),
    ("Train Val", 2),
    ("TRAIN TEST", 2),
    ("training validation", 2),
    ("train dev test", 2),
    ("Training_Set Test_Set", 2),
    ("train holdout", 2),
    ("train2017 val2017", 2),
    ("seg_train seg_test", 2),
]


@pytest.mark.parametrize(("names", "per_class"), SPLITS, ids=[names for names, _ in SPLITS])
def test_splits_are_never_classes(tmp_path: Path, names: str, per_class: int) -> None:
    train, val, *others = names.split()
    classes(tmp_path / train, "cat", "dog")
    classes(tmp_path / val, "cat", "dog", count=per_class)
    for other in others:
        classes(tmp_path / other, "cat", "dog", count=1)
    found = facts(tmp_path)
    assert source(tmp_path).class_names(found) == ["cat", "dog"]
    tested = names.split()[1].lower() in ("test", "test_set", "holdout", "seg_test")
    held_out = (6, 2, 2 * per_class) if tested else (8, 2 * per_class, 2 * len(others))
    assert (found.train_samples, found.val_samples, found.test_samples) == held_out
    assert ("data.val_fraction" in found.attention) == tested


def test_a_class_may_be_called_like_a_split(tmp_path: Path) -> None:
    found = facts(classes(tmp_path, "bus", "car", "train"))
    assert (found.classes, found.train_samples + found.val_samples, found.attention) == (3, 12, "")
    assert facts(classes(tmp_path / "d", "a", "b", "dev")).classes == 3


@pytest.mark.parametrize("inside", ["0.jpg 1.jpg", "unknown/0.jpg", "test/0.jpg test/1.jpg"])
def test_a_test_folder_without_the_classes_is_no_validation_set(tmp_path: Path, inside: str) -> None:
    classes(tmp_path / "train", "cat", "dog", count=10)
    put(tmp_path / "test", *inside.split())
    found = facts(tmp_path)
    assert (found.train_samples, found.val_samples) == (16, 4)
    assert "test has no folders of these classes, and is not used: a part of the training images" in found.attention


def _nfd(text: str) -> str:
    return unicodedata.normalize("NFD", text)


OTHER_LAYOUTS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "one class": (("cat/0.jpg", "cat/1.jpg"), r"a single class, cat", "at least two folders"),
    "a level too deep": (
        ("pets/cat/0.jpg", "pets/cat/1.jpg", "pets/dog/0.jpg"),
        r"single class, pets.* \(cat; dog\)",
        "data.root={d}/pets",
    ),
    "splits a level too deep": (
        ("d/train/a/0.jpg", "d/train/b/0.jpg", "d/val/a/0.jpg"),
        r"\(train; val\)",
        "data.root={d}/d",
    ),
    "a level too deep in train": (
        ("train/t/a/0.jpg", "train/t/b/0.jpg", "val/a/0.jpg"),
        r"train has a single class, t",
        "in {d}/train itself",
    ),
    "a table of labels": (("images/0.jpg", "train.csv"), r"single class, images.*not read \(train\.csv\)", ""),
    "a table in train": (("train/images/0.jpg", "train/labels.xlsx", "val/images/0.jpg"), r"\(labels\.xlsx\)", ""),
    "images alone": (("0.jpg", "1.jfif", "labels.csv"), r"but 2 images that belong to no class.*\(labels\.csv\)", ""),
    "flat splits": (("train/0.jpg", "test/0.jpg", "train.csv"), r"train has no folders.*1 image .*\(train\.csv\)", ""),
    "no train": (("val/cat/0.jpg", "val/dog/0.jpg", "other/0.jpg"), r"holds val, and no folder of training", ""),
    "val without classes": (("train/a/0.jpg", "train/b/0.jpg", "val/0.jpg"), r"val has no folders, of which each", ""),
    "other capitals": (
        ("train/cat/0.jpg", "train/dog/0.jpg", "val/Cat/0.jpg"),
        r"does not have: Cat\. They differ in capitals",
        "",
    ),
    "other classes in test": (
        ("train/a/0.jpg", "train/b/0.jpg", "test/a/0.jpg", "test/c/0.jpg"),
        r"test has classes that .*/train does not have: c",
        "",
    ),
    "other accents": (("train/café/0.jpg", "train/x/0.jpg", _nfd("val/café/0.jpg")), r"in how accents are written", ""),
}


@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_another_layout_is_refused_and_not_trained_at_accuracy_1(tmp_path: Path, name: str) -> None:
    files, says, instead = OTHER_LAYOUTS[name]
    put(tmp_path, *files)
    with pytest.raises(UserError, match=says) as caught:
        facts(tmp_path)
    assert instead.format(d=tmp_path) in caught.value.instead
    if caught.value.instead == f"data.root={tmp_path}/{instead[-4:]}":
        assert source(tmp_path / instead[-4:]).class_names(Facts("", "", 0, 0, (), 0)) == ["cat", "dog"]


HIDDEN = [
    ".ipynb_checkpoints/0-checkpoint.jpg",
    "cat/.ipynb_checkpoints/0-checkpoint.jpg",
    "cat/deep/.cache/0.jpg",
    ".git/a.png",
    "__MACOSX/cat/0.jpg",
    "cat/__MACOSX/0.jpg",
    "@eaDir/0.jpg",
    "cat/@eaDir/0.jpg/SYNOPHOTO_THUMB_M.jpg",
    "#recycle/0.jpg",
    "$RECYCLE.BIN/0.jpg",
    "System Volume Information/0.jpg",
    "cat/.Trash-1000/files/0.jpg",
    "cat/.hidden.jpg",
    "cat/Thumbnails/0.jpg",
]


@pytest.mark.parametrize("splits", [True, False])
def test_what_is_hidden_or_a_systems_own_is_no_sample_and_no_class(tmp_path: Path, splits: bool) -> None:
    root = tmp_path / ".data"  # what the user names may be hidden
    classes(root / "train" if splits else root, "cat", "dog", "owl", count=8)
    if splits:
        classes(root / "val", "cat", "dog", "owl", count=2)
    before, place = facts(root), root / "train" if splits else root
    put(place, *HIDDEN)
    put(place, *(f"{name}/._{n}.jpg" for name in ("cat", "dog", "cat/deep") for n in range(8)), content=APPLE_DOUBLE)
    put(place, "._cat", "cat/.DS_Store", "cat/Thumbs.db", "desktop.ini", "cat/Icon\r", content=b"x")
    after = facts(root)
    assert (after.classes, after.train_samples, after.val_samples) == (3, before.train_samples, before.val_samples)
    for named in ("__MACOSX is", "cat/@eaDir", "cat/.hidden.jpg"):
        assert named in after.attention or "more" in after.attention
    assert "._" not in after.attention and not before.attention
    assert images_in(place)[0] == sorted(f"{name}/{n}.jpg" for name in ("cat", "dog", "owl") for n in range(8))


def test_every_usual_suffix_of_jpeg_is_read_in_any_case(tmp_path: Path) -> None:
    classes(tmp_path, "cat", "dog")
    put(tmp_path, *(f"cat/x{ending}" for ending in (*JPEG, *map(str.upper, JPEG))))
    found = facts(tmp_path)
    assert found.train_samples + found.val_samples == 8 + 2 * len(JPEG) and not found.attention


@pytest.mark.parametrize("content", [JPEG_BYTES, PNG_BYTES, AVIF_BYTES], ids=["JPEG", "PNG", "AVIF"])
def test_a_file_without_a_suffix_is_read_where_it_is_an_image(tmp_path: Path, content: bytes) -> None:
    for name in ("cat/x1", "cat/deep/x2"):
        put(classes(tmp_path, "cat", "dog"), name, content=content + name.encode())
    put(tmp_path, "cat/LICENSE", "dog/empty", content=b"MIT")
    found = facts(tmp_path)
    assert (found.train_samples + found.val_samples, found.attention) == (10, "")


def test_every_image_that_is_not_used_for_its_suffix_is_counted_and_named(tmp_path: Path) -> None:
    put(classes(tmp_path, "cat", "dog"), *(f"cat/{n}{ending}" for n, ending in enumerate((*HEIC, ".HEIC"))))
    put(tmp_path, "cat/a.svg", "dog/b.SVG", content=b"<svg/>")
    put(tmp_path, "dog/c.jpg.bak", "dog/d.jpg~", "dog/e.v2")
    put(tmp_path, "dog/IMG_1", content=HEIC_BYTES)
    put(tmp_path, "cat/notes.txt", "cat/0.xml", "dog/f.weights")
    (tmp_path / "cat" / "notes.txt").write_bytes(JPEG_BYTES)
    (tmp_path / "dog" / "f.weights").write_bytes(b"no image")
    found = facts(tmp_path)
    assert found.train_samples + found.val_samples == 8
    assert "10 images are not used: " in found.attention and "and 3 more" in found.attention
    assert "2 .heic (the package pillow-heif" in found.attention and "1 .heif (the package" in found.attention
    _, passed = images_in(tmp_path)
    for part in (
        "2 .svg, e.g. ",
        "1 .bak (JPEG by contents), e.g. ",
        "1 .jpg~ (JPEG",
        "1 .v2 (JPEG",
        "1 without a suffix (the package pillow-heif",
    ):
        assert any(said.startswith(part) for said in passed), (part, passed)
    assert not {*EXTENSIONS} & {*UNREAD}


def test_a_class_or_a_folder_of_heic_alone_is_refused_with_what_helps(tmp_path: Path) -> None:
    put(classes(tmp_path / "one", "cat", "dog"), "owl/0.HEIC", content=HEIC_BYTES)
    with pytest.raises(
        UserError, match=r"no training images: owl \(1 image is not used: 1 \.heic \(the package pillow-heif"
    ):
        facts(tmp_path / "one")
    put(tmp_path / "all", "cat/0.HEIC", "dog/0.HEIC", content=HEIC_BYTES)
    with pytest.raises(
        UserError, match=r"holds no training images .*2 images are not used: 2 \.heic \(the package pillow-heif"
    ):
        facts(tmp_path / "all")


def test_images_beside_the_class_folders_and_folders_beside_the_splits_are_said(tmp_path: Path) -> None:
    classes(tmp_path / "train", "cat", "dog")
    classes(tmp_path / "val", "cat", "dog")
    put(tmp_path, "unlabelled/0.jpg", "train/stray.jpg", "annotations/a.xml", "readme.jpg")
    said = facts(tmp_path).attention
    assert f"{tmp_path}/unlabelled: no folder of a split, and not used" in said and "annotations" not in said
    assert (
        f"1 image directly in {tmp_path}/train is of no class" in said and f"1 image directly in {tmp_path} is" in said
    )


def test_the_folder_named_for_validation_is_no_class(tmp_path: Path) -> None:
    classes(tmp_path, "cat", "dog")
    classes(tmp_path / "mine", "cat", "dog", count=1)
    found = facts(tmp_path, val="mine")
    assert (found.classes, found.train_samples, found.val_samples) == (2, 8, 2)


def varied(root: Path, *names: str, count: int = 8, seed: int = 0) -> None:
    for label, name in enumerate(names):
        for number in range(count):
            put(root, f"{name}/{number}.jpg", content=encoded(picture(label, 1000 * seed + number, 16, 16)))


def test_validation_images_that_are_copies_of_training_images_are_said(tmp_path: Path) -> None:
    varied(tmp_path / "train", "cat", "dog", count=40)
    varied(tmp_path / "val", "cat", "dog", seed=1)
    assert facts(tmp_path).attention == ""
    put(tmp_path, "val/cat/again.jpg", content=(tmp_path / "train/cat/7.jpg").read_bytes())
    said = facts(tmp_path).attention
    assert said == "1 of 17 validation images are copies of training images: val/cat/again.jpg is train/cat/7.jpg"
    varied(tmp_path / "val", "cat", "dog", count=40)
    assert "64 of 64 validation images that were compared, of 81, are copies" in facts(tmp_path).attention


def test_test_images_that_are_copies_of_other_images_are_said(tmp_path: Path) -> None:
    for seed, name in enumerate(("train", "val", "test")):
        varied(tmp_path / name, "cat", "dog", seed=seed)
    assert facts(tmp_path).attention == ""
    put(tmp_path, "test/cat/again.jpg", content=(tmp_path / "train/cat/7.jpg").read_bytes())
    put(tmp_path, "test/dog/again.jpg", content=(tmp_path / "val/dog/3.jpg").read_bytes())
    said = facts(tmp_path).attention
    assert "1 of 18 test images are copies of training images: test/cat/again.jpg is train/cat/7.jpg" in said
    assert "1 of 18 test images are copies of validation images: test/dog/again.jpg is val/dog/3.jpg" in said


STRANGE = [
    (
        "2023/cat/0.jpg 2023/cat/1.jpg 2024/cat/2.jpg 2024/cat/3.jpg",
        "no image lies directly in a class folder, but deeper (2023/cat; 2024/cat)",
    ),
    (
        "images/0.jpg images/1.jpg masks/0.jpg masks/1.jpg train.csv",
        "the folder images; masks in {d} counts as a class. A table of labels is not read (train.csv)",
    ),
    (
        "Cat/0.jpg Cat/1.jpg cat/0.jpg cat/1.jpg",
        "classes differ in capitals or in how accents are written: Cat and cat",
    ),
]


@pytest.mark.parametrize(("files", "says"), STRANGE, ids=[says[:20] for _, says in STRANGE])
def test_folders_that_are_hardly_classes_are_said(tmp_path: Path, files: str, says: str) -> None:
    for number, name in enumerate(files.split()):
        put(tmp_path, name, content=encoded(picture(0, number, 16, 16)))
    assert says.format(d=tmp_path) in facts(tmp_path).attention


def test_an_archive_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    put(tmp_path, "data.zip", content=b"PK\3\4")
    with pytest.raises(UserError, match="is a file and no folder; an archive is not read"):
        facts(tmp_path / "data.zip")


def test_heic_under_the_name_of_jpeg_is_named_for_what_it_is() -> None:
    with pytest.raises(BadImage, match="is HEIC, which is not read: the package pillow-heif"):
        decode(HEIC_BYTES)
