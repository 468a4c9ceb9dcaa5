"""Files that are small and become huge, or take very long: MNIST's, the reference's JSON, MATLAB's lists, shards,
Criteo rows."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import tarfile
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import loadmat, savemat

from tests import pictures
from tests.pictures import config, encoded, picture, shard, silent
from trainer.config import schema
from trainer.data.criteo.files import find
from trainer.data.criteo.parse import parse
from trainer.data.images.tar_index import NotTar, members
from trainer.data.sets.flowers import Flowers102
from trainer.data.sets.image_folder import ImageFolder
from trainer.data.sets.matlab import NotMatlab, arrays
from trainer.data.sets.mnist import Mnist
from trainer.data.sets.mnist_json import MnistJson
from trainer.data.sets.shards import Shards
from trainer.errors import RunFailed, UserError
from trainer.visible import shortened

MIB = 1 << 20


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))


@contextmanager
def at_most(mib: float, seconds: float = 20.0) -> Iterator[None]:
    """The block allocates no more, and takes no longer on the processor."""
    began = time.process_time()
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < mib * MIB, f"{peak / MIB:.0f} MiB"
    assert time.process_time() - began < seconds


def packed_zeros(mib: int, head: bytes = b"", tail: bytes = b"", fill: bytes = b"\0") -> bytes:
    """gzip of so many MiB of one byte, a thousandth as long."""
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=9) as file:
        file.write(head)
        for _ in range(mib):
            file.write(fill * MIB)
        file.write(tail)
    return out.getvalue()


MNIST_BOMBS = {
    "more than it says": (
        lambda: packed_zeros(300, b"\0\0\x08\x03" + struct.pack(">3I", 30, 28, 28)),
        "has more than its 30 entries",
    ),
    "as much as it says": (
        lambda: packed_zeros(300, b"\0\0\x08\x03" + struct.pack(">3I", 400_000, 28, 28)),
        r"it says that it has 313,600,000 bytes, more than data\.max_file_mib=256",
    ),
    "many dimensions": (lambda: gzip.compress(b"\0\0\x08\xff" + b"\xff" * 1020), "more than data"),
}


@pytest.mark.all
@pytest.mark.parametrize("name", MNIST_BOMBS)
def test_a_packed_file_of_mnist_is_not_unpacked_beyond_what_it_may_be(tmp_path: Path, name: str) -> None:
    packed, says = MNIST_BOMBS[name]
    content = packed()
    root = pictures.mnist(tmp_path, packed=True)
    (root / "MNIST" / "raw" / "train-images-idx3-ubyte.gz").write_bytes(content)
    with at_most(4), pytest.raises(UserError, match=says) as caught:
        Mnist(**config(schema.MnistData, root=str(root))).facts(1)
    assert "train-images-idx3-ubyte.gz" in str(caught.value)


IMAGE = "[" + ",".join(["0"] * 784) + "]"
JSON_BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "an image of 40 million numbers": (
        lambda: b"[[[[" + b"0.5," * 40_000_000 + b"0.5]],[1]]]",
        "image 0 has more than 784 numbers",
    ),
    "packed": (lambda: packed_zeros(3, b"[[[[", fill=b"0,"), "image 0 has more than 784 numbers"),
    "a number of a million digits": (lambda: b"[[[[" + b"7" * 1_000_000 + b"]],[1]]]", "longer than"),
    "packed digits": (lambda: packed_zeros(200, b"[[[[", fill=b"7"), "longer than"),
    "a long text": (lambda: b'[[[["' + b"a, " * 1_000_000 + b'"]],[1]]]', "longer than"),
    "lists in lists": (lambda: b"[" * 200_000 + b"]" * 200_000, "lists in lists in lists"),
    "mappings in mappings": (lambda: b'{"a":' * 200_000 + b"1" + b"}" * 200_000, "at its start"),
    "empty lists": (lambda: b"[[" + b"[]," * 1_000_000 + b"[]]]", "images and|labels|image 0|there is|has no images"),
    "more than the limit": (
        lambda: b"[[[" + f"{IMAGE},".encode() * 2000 + f"{IMAGE}],".encode(),
        r"more than data\.max_file_mib=1",
    ),
    "infinite": (
        lambda: f"[[[{IMAGE.replace('0', '1e400', 1)}],[1]],[[],[]],[[],[]]]".encode(),
        "not finite|range|there is|breaks off",
    ),
    "infinite as float32": (
        lambda: f"[[[{IMAGE.replace('0', '1e39', 1)}],[1]],[[],[]],[[],[]]]".encode(),
        "image 0 has a number that is not finite",
    ),
}


@pytest.mark.all
@pytest.mark.parametrize("name", JSON_BOMBS)
def test_the_json_file_is_refused_where_it_is_not_what_it_should_be_and_not_at_its_end(
    tmp_path: Path, name: str
) -> None:
    make, says = JSON_BOMBS[name]
    path = tmp_path / "m.json"
    path.write_bytes(make())
    limits = {"max_file_mib": 1} if "limit" in name else {}
    with at_most(8), pytest.raises(UserError, match=says) as caught:
        MnistJson(**config(schema.MnistJsonData, path=str(path), **limits)).facts(1)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 500


def matlab(name: str, values: Any, **how: Any) -> bytes:
    out = io.BytesIO()
    savemat(out, {name: values}, **how)
    return out.getvalue()


@pytest.mark.parametrize("packed", [False, True])
def test_matlab_files_are_read_as_by_scipy(packed: bool) -> None:
    random = np.random.default_rng(0)
    for kind in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"):
        for shape in ((1, 5), (3, 4), (1, 1), (2, 0), (2, 3, 4)):
            values = random.integers(0, 100, shape).astype(kind)
            content = matlab("labels", values, do_compression=packed)
            assert np.array_equal(arrays(content, MIB)["labels"], loadmat(io.BytesIO(content))["labels"])
    several = io.BytesIO()
    savemat(
        several,
        {
            "trnid": [[3, 4]],
            "text": "abc",
            "cell": np.array([[1], "x"], dtype=object),
            "valid": [[5.0]],
            "z": 1j,
            "s": {"a": 1},
        },
    )
    found = arrays(several.getvalue(), MIB)
    assert {k: v.tolist() for k, v in found.items()} == {"trnid": [[3, 4]], "valid": [[5.0]]}


def nested_cells(depth: int) -> bytes:
    """Cells in cells, as MATLAB writes them."""
    inner = struct.pack("<2I", 14, 0)
    for _ in range(depth):
        body = struct.pack("<4I", 6, 8, 1, 0) + struct.pack("<2I2i", 5, 8, 1, 1) + struct.pack("<2I", 1, 0) + inner
        inner = struct.pack("<2I", 14, len(body)) + body
    return matlab("a", 1)[:128] + inner


MATLAB: dict[str, tuple[Callable[[], bytes], str]] = {
    "packed": (
        lambda: matlab("labels", np.zeros((1, 400 * MIB // 8)), do_compression=True),
        "larger than 1,048,576 bytes when it is unpacked",
    ),
    "cut off": (lambda: matlab("labels", np.zeros((1, 100)))[:300], "cut off"),
    "no file": (lambda: b"no list", "no MATLAB 5 file"),
    "a size beyond": (
        lambda: matlab("labels", [[1, 2]]).replace(struct.pack("<2i", 1, 2), struct.pack("<2i", 1 << 30, 1 << 30)),
        "numbers for a shape of",
    ),
    "a negative size": (
        lambda: matlab("labels", [[1, 2]]).replace(struct.pack("<2i", 1, 2), struct.pack("<2i", -1, -2)),
        "numbers for a shape of",
    ),
    "only a header": (lambda: matlab("labels", 1)[:128] + struct.pack("<2I", 14, 0), "cut off"),
}


@pytest.mark.all
@pytest.mark.parametrize("name", MATLAB)
def test_crafted_matlab_files_are_one_sentence(name: str) -> None:
    make, says = MATLAB[name]
    content = make()
    with at_most(8), pytest.raises(NotMatlab, match=says):
        arrays(content, MIB)


def test_cells_in_cells_are_passed_over_however_deep_they_are() -> None:
    assert arrays(nested_cells(20_000), MIB) == {}


def test_mutated_matlab_files_are_read_or_refused() -> None:
    import random

    lots = random.Random(0)
    whole = [matlab("labels", np.arange(40)[None], do_compression=packed) for packed in (False, True)]
    for _ in range(1500):
        content = bytearray(lots.choice(whole))
        for _ in range(lots.choice((1, 2, 8))):
            content[lots.randrange(120, len(content))] = lots.randrange(256)
        try:
            arrays(bytes(content), MIB)
        except NotMatlab:
            pass


def test_a_damaged_list_of_flowers_is_named(tmp_path: Path) -> None:
    place = tmp_path / "flowers-102"
    (place / "jpg").mkdir(parents=True)
    (place / "jpg" / "image_00001.jpg").write_bytes(encoded(picture(0, 0)))
    source = Flowers102(**config(schema.Flowers102Data, root=str(tmp_path), max_file_mib=1))
    (place / "setid.mat").write_bytes(matlab("trnid", [[1]]))
    for content, says in (
        (
            matlab("labels", np.zeros((1, 400 * MIB // 8)), do_compression=True),
            r"imagelabels\.mat is damaged: an array in it is larger",
        ),
        (matlab("other", [[1]]), r"imagelabels\.mat lacks 'labels'"),
        (matlab("labels", [[1.5]]), "'labels' has numbers that are not whole"),
        (matlab("labels", [[float("nan")]]), "'labels' has numbers that are not whole"),
        (bytes(2 * MIB), r"imagelabels\.mat is damaged: has 2,097,152 bytes, more than data\.max_file_mib=1"),
        (matlab("labels", [[1]]), r"setid\.mat lacks 'valid'"),
    ):
        (place / "imagelabels.mat").write_bytes(content)
        with pytest.raises(UserError, match=says):
            source.facts(1)


def header(name: bytes, size: int, kind: bytes = b"0", **extra: bytes) -> bytes:
    """A member's block of 512 bytes by hand: what ``tarfile`` would not write."""
    number = (
        b"%011o\0" % size
        if 0 <= size < 8**11
        else bytes([0x80 if size >= 0 else 0xFF]) + (size % 256**11).to_bytes(11, "big")
    )
    block = bytearray(
        name.ljust(100, b"\0")
        + b"0000644\0"
        + b"0000000\0" * 2
        + number
        + b"00000000000\0"
        + b" " * 8
        + kind
        + bytes(355)
    )
    block[257:265] = b"ustar  \0" if kind == b"S" else b"ustar\x0000"
    for place, data in extra.items():
        block[int(place[1:]) : int(place[1:]) + len(data)] = data
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


JPEG = encoded(picture(0, 0))
END = bytes(1024)
LABEL = header(b"p.cls", 1) + padded(b"1")


def sparse(name: bytes) -> bytes:
    """512 bytes that claim to be 8 GB."""
    return header(name, 512, b"S", _386=b"%011o\0" % 0 + b"%011o\0" % 512, _483=b"%011o\0" % (8**11 - 1))


PAX_SPARSE = (
    b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n24 GNU.sparse.name=p.jpg\n34 GNU.sparse.realsize=99999999999\n"
)

TARS: dict[str, tuple[bytes, str]] = {
    "sparse": (sparse(b"p.jpg") + padded(JPEG[:512]) + LABEL + END, r"p\.jpg is a sparse member"),
    "sparse by pax": (
        header(b"x", len(PAX_SPARSE), b"x")
        + padded(PAX_SPARSE)
        + header(b"p.jpg", 1024)
        + padded(b"1\n0\n512\n")
        + bytes(512)
        + LABEL
        + END,
        "sparse|damaged",
    ),
    "sparse label": (
        header(b"p.jpg", len(JPEG)) + padded(JPEG) + sparse(b"p.cls") + bytes(512) + END,
        r"p\.cls is a sparse member",
    ),
    "a member beyond the end": (LABEL + header(b"p.jpg", 10**12) + JPEG, r"p\.jpg .*(ends|beyond)"),
    "a huge member": (header(b"p.jpg", 10**9) + JPEG + LABEL + END, r"p\.jpg"),
    "a negative size": (LABEL + header(b"p.jpg", -512) + JPEG + END, "negative|damaged|not a plain tar"),
    "a huge pax header in a hole": (
        header(b"x", 10**10, b"x") + bytes(4096),
        "it has a header of 10,000,000,000 bytes at byte 0",
    ),
    "a huge long name in a hole": (
        header(b"x", 10**10, b"L") + bytes(4096),
        "it has a header of 10,000,000,000 bytes at byte 0",
    ),
    "a negative pax header": (header(b"x", -1024, b"x") + bytes(4096), "header|damaged|plain tar"),
    "many pax headers": (
        b"".join(header(b"x", 8, b"x") + padded(b"8 a=bcd\n") for _ in range(5000)) + LABEL + END,
        "headers|damaged|holds no samples",
    ),
    "a huge label": (
        header(b"p.jpg", len(JPEG)) + padded(JPEG) + header(b"p.cls", 3 * MIB) + padded(b"1" * 3 * MIB) + END,
        r"p has a label of 3,145,728 bytes in p\.cls",
    ),
    "deep lists": (
        header(b"p.jpg", len(JPEG))
        + padded(JPEG)
        + header(b"p.json", 400_000)
        + padded(b"[" * 200_000 + b"]" * 200_000)
        + END,
        r"p has lists or mappings deeper than data\.max_depth=64 in p\.json",
    ),
    "deep mappings": (
        header(b"p.jpg", len(JPEG))
        + padded(JPEG)
        + header(b"p.json", 1_000_011)
        + padded(b'{"a":' * 200_000 + b"1" + b"}" * 10 + b" " * 0)
        + END,
        "p has|damaged|beyond|ends",
    ),
    "a number of a million digits": (
        header(b"p.jpg", len(JPEG)) + padded(JPEG) + header(b"p.cls", 1_000_000) + padded(b"7" * 1_000_000) + END,
        r"p has a number of 1,000,000 digits in p\.cls|p has b'777",
    ),
    "digits in json": (
        header(b"p.jpg", len(JPEG))
        + padded(JPEG)
        + header(b"p.json", 1_000_010)
        + padded(b'{"label":' + b"7" * 1_000_000 + b"}")
        + END,
        "p has ",
    ),
}


@pytest.mark.parametrize("name", TARS)
def test_crafted_shards_are_one_sentence_with_the_place(tmp_path: Path, name: str) -> None:
    content, says = TARS[name]
    path = tmp_path / "t.tar"
    path.write_bytes(content)
    if "hole" in name:
        os.truncate(path, 2 * 10**10)
    with at_most(64), pytest.raises(UserError, match=says) as caught:
        Shards(**config(schema.ShardsData, image_size=32, path=str(path))).facts(1)
    said = str(caught.value)
    assert "t.tar" in said and "\n" not in said and len(said) < 600, said


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_where_tarfile_finds_them(tmp_path: Path, form: int) -> None:
    names = [
        "a.jpg",
        "deep/" * 12 + "b.jpg",
        "d" * 90 + "/" + "n" * 90 + ".jpg",
        "blüte.jpg",
        "empty.cls",
        "with space.JSON",
    ]
    names += ["long/" * 40 + "x" * 150 + ".jpg"] if form != tarfile.USTAR_FORMAT else []
    with tarfile.open(tmp_path / "t.tar", "w", format=form) as tar:
        for number, name in enumerate(names):
            member = tarfile.TarInfo(name)
            member.size, member.mtime = number * 300 % 1300, 1.5 if form == tarfile.PAX_FORMAT else 1
            tar.addfile(member, io.BytesIO(bytes([number]) * member.size))
            for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
                other = tarfile.TarInfo(f"{number}.jpg")
                other.type, other.linkname = kind, "y" * 120 if form != tarfile.USTAR_FORMAT else "y"
                tar.addfile(other)
    with tarfile.open(tmp_path / "t.tar") as tar:
        truth = [(m.name, m.offset_data, m.size) for m in tar if m.isfile()]
    assert [name for name, _, _ in truth] == names
    for cut in (0, 1024):
        whole = (tmp_path / "t.tar").stat().st_size
        with (tmp_path / "t.tar").open("rb") as file:
            assert [(m.name, m.start, m.size) for m in members(file, whole)] == truth
        content = (tmp_path / "t.tar").read_bytes()
        (tmp_path / "t.tar").write_bytes(
            content.rstrip(b"\0").ljust(-(-len(content.rstrip(b"\0")) // 512) * 512, b"\0") if cut == 0 else content
        )
    damaged = bytearray((tmp_path / "t.tar").read_bytes())
    damaged[truth[2][1] - 300] ^= 255
    (tmp_path / "t.tar").write_bytes(damaged)
    with (tmp_path / "t.tar").open("rb") as file, pytest.raises(NotTar, match="it has no header of a member at byte"):
        list(members(file, len(damaged)))


def test_a_shard_that_is_no_file_is_named_and_not_waited_for(tmp_path: Path) -> None:
    shard(tmp_path / "a.tar", [(f"p{n}", JPEG, n % 2) for n in range(8)])
    os.mkfifo(tmp_path / "b.tar")
    with pytest.raises(UserError, match=r"b\.tar\)?: .*is a FIFO and not a regular file"):
        Shards(**config(schema.ShardsData, image_size=32, path=str(tmp_path / "*.tar"))).facts(1)
    (tmp_path / "b.tar").unlink()
    (tmp_path / "b.tar").symlink_to("a.tar")
    facts = Shards(**config(schema.ShardsData, image_size=32, path=str(tmp_path / "*.tar"))).facts(1)
    assert facts.train_samples + facts.val_samples == 8 and "b.tar is " in facts.attention


def test_braces_of_very_many_names_are_refused() -> None:
    with at_most(1, 2), pytest.raises(UserError, match="means 100,000,000,000 files, more than 1,000,000"):
        Shards(**config(schema.ShardsData, path="a-{0..99999}-{000000..999999}.tar")).facts(1)


def test_labels_of_validation_that_training_does_not_have_are_refused(tmp_path: Path) -> None:
    shard(tmp_path / "a.tar", [(f"p{n}", JPEG, n % 2) for n in range(8)])
    shard(tmp_path / "v.tar", [(f"v{n}", JPEG, n) for n in range(3)])
    with pytest.raises(UserError, match="1 class is in the validation images and not in the training images: 2"):
        Shards(**config(schema.ShardsData, path=str(tmp_path / "a.tar"), val_path=str(tmp_path / "v.tar"))).facts(1)


def test_nested_json_within_the_limit_is_a_label(tmp_path: Path) -> None:
    deep = json.dumps({"label": 1, "text": "]]][[[{{{" * 50, "more": eval("[" * 60 + "]" * 60)}).encode()
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for name, data in (
            ("p.jpg", JPEG),
            ("p.json", deep),
            ("q.jpg", JPEG),
            ("q.cls", b"0"),
            ("r.jpg", JPEG),
            ("r.cls", b" 1\n"),
            ("s.jpg", JPEG),
            ("s.cls", b"0"),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    facts = Shards(**config(schema.ShardsData, image_size=32, path=str(tmp_path / "t.tar"))).facts(1)
    assert facts.train_samples + facts.val_samples == 4
    with pytest.raises(UserError, match=r"deeper than data\.max_depth=60 in p\.json"):
        Shards(**config(schema.ShardsData, image_size=32, path=str(tmp_path / "t.tar"), max_depth=60)).facts(1)


ROW = b"1\t" + b"\t".join(b"%d" % n for n in range(13)) + b"\t" + b"\t".join(b"%08x" % n for n in range(26)) + b"\n"


@pytest.mark.parametrize("field", [1, 20])
def test_a_row_of_criteo_with_a_huge_field_is_malformed_and_costs_little(field: int) -> None:
    """A token of 8 MiB took a round of hashing for each eight of its bytes."""
    parts = ROW[:-1].split(b"\t")
    parts[field] = b"7" * (1 << 20)
    with at_most(400, seconds=5):
        parsed = parse(ROW + b"\t".join(parts) + b"\n" + ROW, 1000)
    assert len(parsed.labels) == 2
    assert parsed.bad == [(1, f"{len(b' '.join(parts)):,} bytes, more than a row may have (64 KiB)")]


def test_criteo_files_that_are_no_files_or_the_same_one_are_named(tmp_path: Path) -> None:
    (tmp_path / "day_0").write_bytes(ROW)
    (tmp_path / "link").symlink_to("day_0")
    assert find(str(tmp_path), "data.path") == [tmp_path / "day_0"], "each real file once"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=r"pipe.*: is a FIFO and not a regular file"):
        find(str(tmp_path), "data.path")
    with pytest.raises(UserError, match=r"pipe: is a FIFO and not a regular file"):
        find(str(tmp_path / "pipe"), "data.path")


LONG = "a-" * 20_000


def long_names() -> dict[str, tuple[list[tuple[str, bytes]], str]]:
    image = encoded(picture(0, 0))
    return {
        "no label": ([(f"{LONG}.jpg", image)], "has an image but no label"),
        "another label": ([(f"{LONG}.jpg", image), (f"{LONG}.cls", b"rose")], "b'rose' in a-a-"),
        "a huge label": (
            [(f"{LONG}.jpg", image), (f"{LONG}.cls", bytes(2 << 20))],
            r"a label of 2,097,152 bytes in a-a-",
        ),
        "broken": (
            [(f"{LONG}.jpg", b"no image"), (f"{LONG}.cls", b"0"), ("b.jpg", image), ("b.cls", b"1")],
            "1 of 4 images cannot be decoded",
        ),
    }


@pytest.mark.parametrize("name", long_names())
def test_a_very_long_name_of_a_member_is_shortened_in_sentences(name: str, tmp_path: Path) -> None:
    members, says = long_names()[name]
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        for called, content in members:
            info = tarfile.TarInfo(called)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    source = Shards(
        **config(
            schema.ShardsData, path=str(tmp_path / "a.tar"), val_path=str(tmp_path / "a.tar"), verify=True, cache="none"
        )
    )
    with pytest.raises(UserError, match=says) as caught:
        source.prepare(source.facts(1), silent)
    said = str(caught.value)
    assert len(said) < 1500 and "..." in said and LONG[:200] not in said and str(tmp_path / "a.tar")[:40] in said


def test_no_reason_holds_a_word_of_thousands_of_characters() -> None:
    said = str(UserError("data.root=x", f"has {LONG} and {'b' * 900}", f"data.root={'c' * 2000}"))
    assert len(said) < 3300 and "b" * 900 in said and "c" * 2000 in said and said.startswith("data.root=x: has a-a-")
    assert shortened("x" * 200) == "x" * 200 and len(shortened("x" * 201)) == 200
    assert shortened("/data/" + "x" * 500 + "/rose.jpg").endswith("xxx/rose.jpg")


def test_weights_in_a_packed_archive_are_refused(tmp_path: Path) -> None:
    import zipfile

    import torch

    from trainer.weights import tensor_files

    torch.save({"a": torch.zeros(1 << 20)}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    assert list(tensor_files.read(tmp_path / "plain.pt", "weights=plain.pt")) == ["a"]
    with pytest.raises(UserError, match=r"weights=packed\.pt: is a packed archive"):
        tensor_files.read(tmp_path / "packed.pt", "weights=packed.pt")
    for name in ("cut.pt", "cut.safetensors", "nothing.safetensors"):
        (tmp_path / name).write_bytes((tmp_path / "plain.pt").read_bytes()[:3000] if "cut" in name else b"")
        with pytest.raises(UserError, match=rf"weights={name}: (cannot be read|is empty)") as caught:
            tensor_files.read(tmp_path / name, f"weights={name}")
        assert "\n" not in str(caught.value)


def test_arrays_of_the_cache_that_are_cut_off_are_one_sentence(tmp_path: Path) -> None:
    source = Mnist(**config(schema.MnistData, root=str(pictures.mnist(tmp_path))))
    facts = source.prepare(source.facts(1), pictures.silent)
    (kept,) = (tmp_path / "cache").rglob("train.npy")
    os.truncate(kept, 2000)
    with pytest.raises(RunFailed, match=r"the arrays of train in .* are gone or damaged: .* made anew\."):
        source.open(facts)
    folder = ImageFolder(
        **config(schema.ImageFolderData, root=str(pictures.image_folder(tmp_path / "d")), image_size=32, cache="ram")
    )
    facts = folder.prepare(folder.facts(1), pictures.silent)
    train = folder.open(facts).train
    for kept in (tmp_path / "cache").rglob("pixels.bin"):
        os.truncate(kept, 2000)
    with pytest.raises(
        RunFailed, match=r"the decoded images in .* are gone or damaged: pixels\.bin has 2,000 bytes instead of"
    ):
        train.image(0)


def test_zlib_is_what_tells_bombs_apart() -> None:
    """What the tests above pack is really that much larger than its file."""
    assert len(zlib.compress(bytes(MIB), 9)) < MIB / 900
