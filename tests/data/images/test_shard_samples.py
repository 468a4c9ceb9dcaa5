"""Tar shards as people have them: 24 samples of 3 classes with their labels, or a sentence."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pictures import config, encoded, picture
from trainer.config import schema
from trainer.data.images.shard_samples import ShardIndex, index_of
from trainer.data.sets.shards import LabelLimits, Shards
from trainer.errors import UserError

SAMPLES = range(24)
JPEG = {n: encoded(picture(n % 3, n, 8, 8)) for n in SAMPLES}
PNG = encoded(picture(0, 0, 8, 8), "PNG")
Members = list[tuple[str, bytes]]


def label(number: int) -> bytes:
    return str(number % 3).encode()


def of_each(make: Callable[[int], Members]) -> Members:
    return [member for number in SAMPLES for member in make(number)]


def plain(image: str, cls: str) -> Members:
    return of_each(lambda n: [(image.format(n), JPEG[n]), (cls.format(n), label(n))])


def tar(path: Path, found: Members) -> Path:
    with tarfile.open(path, "w") as file:
        for name, content in found:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path


def indexed(path: Path, found: Members) -> ShardIndex:
    return index_of([tar(path, found)], LabelLimits(1024, 64))


META = json.dumps({"width": 40, "url": "u"}).encode()
APPLE_DOUBLE = b"\0\5\x16\7" + bytes(160)
PLAIN = plain("{:05d}.jpg", "{:05d}.cls")

WHOLE: dict[str, Members] = {
    "plain": PLAIN,
    "in folders, with a dot before": plain("./a/{:05d}.jpg", "./a/{:05d}.cls"),
    "images first, then labels": [*PLAIN[::2], *PLAIN[1::2]],
    "metadata as json before the image": of_each(
        lambda n: [(f"{n}.json", META), (f"{n}.jpg", JPEG[n]), (f"{n}.cls", label(n))]
    ),
    "metadata as json after it": of_each(
        lambda n: [(f"{n}.cls", label(n)), (f"{n}.jpg", JPEG[n]), (f"{n}.json", META)]
    ),
    "damaged json beside a label": of_each(
        lambda n: [(f"{n}.cls", label(n)), (f"{n}.jpg", JPEG[n]), (f"{n}.json", b"{")]
    ),
    "the same label twice": of_each(
        lambda n: [(f"{n}.jpg", JPEG[n]), (f"{n}.cls", label(n)), (f"{n}.json", b'{"label": %s}' % label(n))]
    ),
    "two suffixes": plain("{:05d}.input.jpg", "{:05d}.target.cls"),
    "dots in names": plain("img.{:05d}.jpg", "img.{:05d}.cls"),
    "dots in names and json": of_each(
        lambda n: [(f"a.b.{n}.jpg", JPEG[n]), (f"a.b.{n}.json", b'{"label": %s}' % label(n))]
    ),
    "dots in some names": of_each(
        lambda n: [(f"{n}{'.v2' * (n % 2)}.jpg", JPEG[n]), (f"{n}{'.v2' * (n % 2)}.cls", label(n))]
    ),
    "a dot in the folder's name": plain("v1.0/{:05d}.jpg", "v1.0/{:05d}.cls"),
    "capitals": plain("{:05d}.JPEG", "{:05d}.CLS"),
    "other suffixes of JPEG": of_each(
        lambda n: [(f"{n}.{'jfif' if n % 2 else 'jpe'}", JPEG[n]), (f"{n}.cls", label(n))]
    ),
    "without a suffix": plain("{:05d}", "{:05d}.cls"),
    "Apple's other halves": [
        *of_each(lambda n: [(f"./._{n:05d}.jpg", APPLE_DOUBLE), (f"__MACOSX/._{n:05d}.jpg", APPLE_DOUBLE)]),
        *PLAIN,
    ],
    "thumbnails": [
        *PLAIN,
        *plain("@eaDir/{:05d}.jpg", "@eaDir/{:05d}.cls"),
        *plain(".cache/{:05d}.jpg", ".cache/{:05d}.cls"),
    ],
    "captions and other files": [
        *PLAIN,
        *of_each(lambda n: [(f"{n:05d}.txt", b"a cat"), (f"{n:05d}.npy", b"\x93NUMPY")]),
        ("dataset.json", META),
    ],
    "spaces around labels": of_each(lambda n: [(f"{n}.jpg", JPEG[n]), (f"{n}.cls", b" %s\r\n" % label(n))]),
}


@pytest.mark.parametrize("name", WHOLE)
def test_every_sample_has_its_image_and_label(tmp_path: Path, name: str) -> None:
    index = indexed(tmp_path / "s.tar", WHOLE[name])
    content = (tmp_path / "s.tar").read_bytes()
    found = [content[start : start + size] for start, size in index.spans]
    assert sorted(zip(found, index.labels, strict=True)) == sorted((JPEG[n], n % 3) for n in SAMPLES)
    assert len(set(index.names)) == 24 and not index.said


TWICE = [*PLAIN[:24], *PLAIN[:24]]
REFUSED: dict[str, tuple[Members, str]] = {
    "the same sample twice": (TWICE, r"12 of 12 samples cannot be told apart: .*s\.tar:00000 has 00000\.jpg 2 times"),
    "the same image twice": ([*PLAIN, PLAIN[0]], r"1 of 24 samples cannot be told apart: .*00000\.jpg 2 times"),
    "the same label twice": ([*PLAIN, PLAIN[1]], r"1 of 24 .*00000\.cls 2 times"),
    "two images": (
        [*PLAIN, *of_each(lambda n: [(f"{n:05d}.png", PNG)])],
        r"24 of 24 .*00000 has 2 images \(00000\.jpg; 00000\.png\)",
    ),
    "an image and its mask": (
        of_each(lambda n: [(f"{n}.input.jpg", JPEG[n]), (f"{n}.mask.png", PNG), (f"{n}.cls", label(n))]),
        r"0 has 2 images \(0\.input\.jpg; 0\.mask\.png\)",
    ),
    "two labels that differ": (
        [*PLAIN, ("00001.json", b'{"label": 0}')],
        r"1 of 24 .*00001 has the label 1 in \.cls and 0 in \.json",
    ),
    "a word as label": (
        of_each(lambda n: [(f"{n}.jpg", JPEG[n]), (f"{n}.cls", b"cat")]),
        r"24 of 24 samples have no label .*0 has b'cat' in 0\.cls",
    ),
    "no label": (
        [m for m in PLAIN if m[0] != "00005.cls"],
        r"1 of 24 samples have no label .*:00005 has an image but no label",
    ),
    "no label among dotted names": (
        [m for m in WHOLE["dots in names"] if m[0] != "img.00005.cls"],
        r"1 of 24 samples have no label .*:img\.00005 has an image but no label",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sample_is_one_sentence(tmp_path: Path, name: str) -> None:
    found, says = REFUSED[name]
    with pytest.raises(UserError, match=says):
        indexed(tmp_path / "s.tar", found)


def test_labels_and_images_that_are_left_over_are_named(tmp_path: Path) -> None:
    found = [m for m in PLAIN if m[0] != "00005.jpg"]
    found += [("a.heic", b"\0\0\0\x18ftypheic"), ("a.cls", b"1"), ("b.jpg.bak", JPEG[0])]
    assert indexed(tmp_path / "s.tar", found).said == [
        f"2 labels belong to no image: {tmp_path}/s.tar:00005.cls; {tmp_path}/s.tar:a.cls",
        f"2 images are not used: 1 .heic (the package pillow-heif opens them for Pillow, which saves them as "
        f"JPEG), e.g. "
        f"{tmp_path}/s.tar:a.heic; 1 .bak (JPEG by contents), e.g. {tmp_path}/s.tar:b.jpg.bak",
    ]


def source(path: Path, **options: Any) -> Shards:
    return Shards(**config(schema.ShardsData, path=str(path), image_size=32, cache="none", **options))


def test_left_over_labels_are_said_from_the_kept_index_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    path = tar(tmp_path / "s.tar", [m for m in PLAIN if m[0] != "00005.jpg"])
    first = source(path).facts(1)
    source(path).prepare(first, lambda *_: None)
    again = source(path).facts(1)
    assert (tmp_path / "cache").exists() and again == first
    assert again.attention == f"1 label belongs to no image: {path}:00005.cls"


def test_labels_that_begin_with_1_are_said(tmp_path: Path) -> None:
    found = of_each(lambda n: [(f"{n}.jpg", JPEG[n]), (f"{n}.cls", str(n % 3 + 1).encode())])
    assert (
        "1 of 4 labels are of no sample: 0 (labels begin with 0)"
        in source(tar(tmp_path / "s.tar", found)).facts(1).attention
    )


def test_one_label_alone_is_refused(tmp_path: Path) -> None:
    found = of_each(lambda n: [(f"{n}.jpg", JPEG[n]), (f"{n}.cls", b"2")])
    with pytest.raises(UserError, match="training samples have the label 2, so that any model is right"):
        source(tar(tmp_path / "s.tar", found)).facts(1)


@pytest.mark.parametrize("program", ["gzip", "bzip2", "xz"])
def test_a_packed_shard_is_named_with_what_unpacks_it(tmp_path: Path, program: str) -> None:
    import bz2
    import lzma

    content = tar(tmp_path / "s.tar", PLAIN).read_bytes()
    pack = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}[program]
    (tmp_path / "s.tar").write_bytes(pack(content))
    with pytest.raises(
        UserError, match=rf"is not a plain tar file: it is packed by {program} \(\w+cat FILE > NEW\.tar\)"
    ):
        source(tmp_path / "s.tar").facts(1)
