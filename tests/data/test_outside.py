"""Images from outside: what is huge, special, linked twice, missing or of a strange kind is named, and nothing waits
for it."""

from __future__ import annotations

import io
import os
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import trainer
from tests.pictures import CLASSES, config, encoded, image_folder, picture, silent
from trainer.config import schema
from trainer.data.augment.views import CentreView
from trainer.data.feed import Feed
from trainer.data.images.decode import decode, decode_grey
from trainer.data.images.header import BadImage, size_of
from trainer.data.images.listing import images_in
from trainer.data.limits import Limits
from trainer.data.picture_preprocessing import Centre
from trainer.data.placement import Placement
from trainer.data.reader import Reading
from trainer.data.reading_processes import deaths_named, from_processes
from trainer.data.regular_files import open_regular, read_regular
from trainer.data.sampler import DistributedBatchSampler, EvaluationSampler
from trainer.data.sets.image_folder import ImageFolder
from trainer.errors import RunFailed, UserError


def source(root: Path, **options: Any) -> ImageFolder:
    return ImageFolder(**config(schema.ImageFolderData, root=str(root), image_size=32, **options))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))


def png_bomb(side: int = 20_000) -> bytes:
    """A PNG of that many pixels each way, all black, one bit each: 50 KB that become 1.2 GB."""
    return png(side, side, 1, 0, zlib.compress(bytes((side // 8 + 1) * side), 9))


def png(width: int, height: int, bits: int, kind: int, data: bytes) -> bytes:
    parts = ((b"IHDR", struct.pack(">2I5B", width, height, bits, kind, 0, 0, 0)), (b"IDAT", data), (b"IEND", b""))
    chunks = [struct.pack(">I", len(d)) + name + d + struct.pack(">I", zlib.crc32(name + d)) for name, d in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def peak_of(script: str, *args: object) -> tuple[str, int]:
    """What a process prints, and the MiB that it takes beyond its imports (ru_maxrss of a fresh one)."""
    lines = (
        f"import resource, sys\nfrom trainer.data.images.decode import decode\nfrom trainer.data.images.header "
        f"import BadImage\nbefore = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n{script}\n"
        f"print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", lines, *map(str, args)], capture_output=True, text=True, timeout=2000)
    assert done.returncode == 0, done.stderr
    *said, peak = done.stdout.strip().splitlines()
    return "\n".join(said), int(peak) >> 10


@pytest.mark.all
def test_an_image_that_is_huge_when_decoded_is_named_and_takes_no_memory(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.png"
    bomb.write_bytes(png_bomb())
    assert bomb.stat().st_size < 60_000
    said, mib = peak_of("try: decode(open(sys.argv[1], 'rb').read())\nexcept BadImage as error: print(error)", bomb)
    assert said == "has 20000 x 20000 pixels, more than data.max_pixels=150000000" and mib < 50


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "GIF", "BMP", "PPM"])
def test_the_limit_of_pixels_is_asked_of_every_format_before_it_is_decoded(kind: str) -> None:
    content = encoded(Image.new("RGB", (60, 50)), kind)
    assert decode(content, Limits(pixels=3000)).shape == (3, 50, 60)
    for read in (decode, decode_grey, size_of, Centre(32, 32), Centre(32, 32, channels=1)):
        limits = Limits(pixels=2999)
        with pytest.raises(BadImage, match=r"has 60 x 50 pixels, more than data\.max_pixels=2999"):
            read(content) if isinstance(read, Centre) and setattr_(read, limits) else read(content, limits)  # type: ignore[operator]


def setattr_(centre: Centre, limits: Limits) -> bool:
    object.__setattr__(centre, "limits", limits)
    return True


@pytest.mark.parametrize("cache", ["ram", "none"])
def test_images_beyond_a_limit_count_as_broken_with_their_name(tmp_path: Path, cache: str) -> None:
    root = image_folder(tmp_path / "d")
    (root / "train" / "iris" / "2.jpg").write_bytes(png(20_000, 20_000, 8, 2, zlib.compress(bytes(9))))
    (root / "val" / "rose" / "1.jpg").write_bytes(encoded(picture(0, 0)) + bytes(3 << 20))
    folder = source(root, cache=cache, verify=True, max_file_mib=2)
    with pytest.raises(
        UserError,
        match=(
            r"2 of 24 images .*iris/2\.jpg: has 20000 x 20000 pixels, more than data\.max_pixels=150000000; "
            r".*rose/1\.jpg: has 3,\d+,\d+ bytes, more than data\.max_file_mib=2"
        ),
    ) as caught:
        folder.prepare(folder.facts(1), silent)
    assert "on_bad=skip" in caught.value.instead
    assert source(root, max_file_mib=4, max_pixels=10**9, cache="none").facts(1).train_samples == 18


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
FITS = b"".join(
    card.ljust(80)
    for card in (
        b"SIMPLE  =                    T",
        b"BITPIX  =                    8",
        b"NAXIS   =                    2",
        b"NAXIS1  =                    4",
        b"NAXIS2  =                    4",
        b"END",
    )
).ljust(2880) + bytes(2880)


def in_ico(content: bytes) -> bytes:
    return struct.pack("<3H4B2H2I", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(content), 22) + content


def in_icns(content: bytes) -> bytes:
    return b"icns" + struct.pack(">I", 16 + len(content)) + b"ic07" + struct.pack(">I", 8 + len(content)) + content


OTHER_KINDS = {
    "EPS": EPS,
    "FITS": FITS,
    "ICO": in_ico(png_bomb(4000)),
    "ICNS": in_icns(png_bomb(4000)),
    **{kind: encoded(picture(0, 0), kind) for kind in ("TGA", "PCX", "SGI", "JPEG2000", "DDS", "IM", "SPIDER")},
}


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_kinds_that_are_not_named_are_refused_whatever_their_name_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("a program was started, or something was unpacked")

    for what in (
        "subprocess.Popen",
        "subprocess.check_call",
        "PIL.EpsImagePlugin.Ghostscript",
        "PIL.ImageFile.ImageFile.load",
    ):
        monkeypatch.setattr(what, never)
    for read in (decode, decode_grey, size_of, Centre(32, 32), Centre(32, 32, channels=1)):
        with pytest.raises(BadImage, match=r"is no image of a kind that can be read \(JPEG, PNG"):
            read(OTHER_KINDS[name])  # type: ignore[operator]


def test_images_are_opened_in_one_place_alone() -> None:
    """Where the kinds and the limits are asked."""
    package = Path(trainer.__file__).parent
    found = [
        path.name
        for path in package.rglob("*.py")
        if "Image.open(" in path.read_text() or "imread(" in path.read_text()
    ]
    assert found == ["header.py"]


@pytest.mark.parametrize(
    "error", [MemoryError(), struct.error("unpack"), subprocess.CalledProcessError(1, "gs"), AttributeError("x")]
)
def test_whatever_a_decoder_breaks_with_the_image_is_named(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*args: Any, **options: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr("PIL.Image.Image.convert", breaks)
        patched.setattr("torchcodec.decoders.decode_image", breaks)
        for kind in ("PNG", "BMP"):
            with pytest.raises(BadImage, match="breaks its decoder, "):
                decode(encoded(picture(0, 0), kind))
    with monkeypatch.context() as patched:
        patched.setattr("PIL.Image.open", breaks)
        root = image_folder(tmp_path / "d")
        with pytest.raises(UserError, match=r"24 of 24 images .*daisy/0\.jpg: breaks its decoder, \w+[:;]"):
            folder = source(root, cache="none", verify=True)
            folder.prepare(folder.facts(1), silent)


def test_of_an_animation_the_first_frame_alone_is_decoded() -> None:
    frames = [picture(n % 3, n).quantize() for n in range(40)]
    for kind in ("GIF", "WEBP", "AVIF"):
        content = io.BytesIO()
        frames[0].convert("RGB").save(content, kind, save_all=True, append_images=frames[1:], lossless=True)
        with Image.open(io.BytesIO(content.getvalue())) as image:
            truth = np.asarray(image.convert("RGB"))
        assert np.array_equal(decode(content.getvalue()).permute(1, 2, 0).numpy(), truth)
    held = torch.from_numpy(truth.copy()).nbytes
    assert decode(content.getvalue()).untyped_storage().nbytes() == held, "not one of 40 frames"


def test_a_strip_is_cut_before_it_is_resized() -> None:
    """1 x 65,000 pixels: resized to 256 on the short side these would be 12.8 GB."""
    strip = torch.randint(0, 256, (3, 1, 65_000), dtype=torch.uint8)
    assert CentreView(256, 224).one(strip).shape == (3, 224, 224)
    assert CentreView(256, 224).one(strip.transpose(1, 2)).shape == (3, 224, 224)


BITS_16 = np.arange(0, 65536, 4369, dtype=np.uint16).reshape(4, 4)
TRUTH_16 = np.round(BITS_16 / 257).astype(np.uint8)


def tiff(values: np.ndarray, photometric: int = 1, order: str = "<") -> bytes:
    """A grey TIFF of one strip, by hand: of the array's type, ``photometric`` 0 where 0 is white."""
    height, width = values.shape
    data = values.astype(values.dtype.newbyteorder(order)).tobytes()
    kind = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    tags = [
        (256, width),
        (257, height),
        (258, 8 * values.itemsize),
        (259, 1),
        (262, photometric),
        (273, 8),
        (277, 1),
        (278, height),
        (279, len(data)),
        (339, kind),
    ]
    ifd = struct.pack(f"{order}H", len(tags)) + b"".join(
        struct.pack(f"{order}HHI", t, 4, 1) + struct.pack(f"{order}I", v) for t, v in tags
    )
    magic = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, 8 + len(data))
    return magic + data + ifd + bytes(4)


SIXTEEN = {
    "tiff": tiff(BITS_16),
    "tiff, big-endian": tiff(BITS_16, order=">"),
    "tiff by pillow": encoded(Image.fromarray(BITS_16), "TIFF"),
    "pgm": b"P5\n4 4\n65535\n" + BITS_16.astype(">u2").tobytes(),
    "pgm in text": b"P2\n4 4\n65535\n" + " ".join(map(str, BITS_16.ravel())).encode(),
    "png": encoded(Image.fromarray(BITS_16), "PNG"),
}


@pytest.mark.parametrize("name", SIXTEEN)
def test_grey_images_of_16_bits_keep_their_shades_on_every_path(tmp_path: Path, name: str) -> None:
    content = SIXTEEN[name]
    rgb = np.repeat(TRUTH_16[..., None], 3, 2)
    assert np.array_equal(decode(content).permute(1, 2, 0).numpy(), rgb)
    assert np.array_equal(decode_grey(content)[0].numpy(), TRUTH_16)
    assert np.array_equal(Centre(4, 4)(content).permute(1, 2, 0).numpy(), rgb), "as mode=predict looks at it"
    assert np.array_equal(Centre(4, 4, channels=1)(content)[0].numpy(), TRUTH_16)
    root = image_folder(tmp_path / "d")
    (root / "train" / "daisy" / "0.tif").write_bytes(content)
    for cache in ("ram", "none"):
        folder = source(root, cache=cache)
        train = folder.open(folder.prepare(folder.facts(1), silent)).train
        number = train.listing.names.index(str(root / "train" / "daisy" / "0.tif"))
        assert np.array_equal(train.image(number).permute(1, 2, 0).numpy(), rgb), cache


def test_ranges_of_12_bits_and_of_negatives_are_followed() -> None:
    assert np.array_equal(decode_grey(tiff(BITS_16, photometric=0))[0].numpy(), 255 - TRUTH_16)
    values = (np.arange(16) * 273).astype(np.uint16).reshape(4, 4)
    packed = b"".join(bytes([a >> 4, (a & 15) << 4 | b >> 8, b & 255]) for a, b in values.reshape(-1, 2).tolist())
    content = tiff(values).replace(values.tobytes(), packed + bytes(32 - len(packed)))
    content = content.replace(struct.pack("<HHII", 258, 4, 1, 16), struct.pack("<HHII", 258, 4, 1, 12))
    content = content.replace(struct.pack("<HHII", 279, 4, 1, 32), struct.pack("<HHII", 279, 4, 1, 24))
    assert np.array_equal(decode_grey(content)[0].numpy(), np.round(values * (255 / 4095)))
    assert np.array_equal(
        decode_grey(b"P5\n4 4\n4095\n" + values.astype(">u2").tobytes())[0].numpy(), np.round(values * (255 / 4095))
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (tiff((BITS_16 / 65535).astype(np.float32)), "floating-point numbers, whose range is not known"),
        (encoded(Image.fromarray((BITS_16 / 65535).astype(np.float32)), "TIFF"), "floating-point numbers"),
        (tiff(BITS_16.astype(np.int32)), "signed numbers or such of 32 bits"),
        (tiff(BITS_16.astype(np.uint32)), "signed numbers or such of 32 bits"),
        (tiff((BITS_16 // 4).astype(np.int16)), "signed numbers"),
        (b"Pf\n4 4\n-1.0\n" + BITS_16.astype("<f4").tobytes(), "floating-point numbers"),
        (b"", r"^is empty \(0 bytes\)$"),
        (
            b"this is no image",
            (
                r"^is no image of a kind that can be read \(JPEG, PNG, WEBP, AVIF, GIF, BMP, TIFF, PPM\), or its "
                r"beginning is damaged$"
            ),
        ),
        (encoded(picture(0, 0), "PNG")[:300], "truncated|corrupted"),
        (encoded(picture(0, 0), "TIFF")[:300], "^[^<]*[^.]$"),
    ],
)
def test_what_cannot_be_shown_rightly_is_refused_in_words_of_people(content: bytes, says: str) -> None:
    for read in (decode, decode_grey):
        with pytest.raises(BadImage, match=says) as caught:
            read(content)
        said = str(caught.value)
        assert " at 0x" not in said and "buffer length" not in said and not said.endswith("."), said


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "CMYK", "YCbCr"])
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "JPEG", "BMP", "PPM"])
def test_kinds_of_pixels_are_the_same_on_every_path(mode: str, kind: str) -> None:
    try:
        content = encoded(picture(1, 0).convert(mode), kind)
    except (OSError, KeyError, ValueError):
        pytest.skip("there is no such file")
    with Image.open(io.BytesIO(content)) as image:
        plain = image.convert("L") if image.mode == "LA" else image
        truth, grey = np.asarray(plain.convert("RGB")), np.asarray(image.convert("L"))
    assert np.array_equal(decode(content).permute(1, 2, 0).numpy(), truth)
    assert np.array_equal(Centre(40, 40)(content).shape, (3, 40, 40))
    assert np.array_equal(decode_grey(content)[0].numpy(), grey)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    short = path.parent / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(short))
    short.rename(path)


SPECIAL: dict[str, tuple[Callable[[Path], Any], str]] = {
    "fifo": (make_fifo, "is a FIFO"),
    "socket": (make_socket, "is a socket"),
    "zero": (lambda path: path.symlink_to("/dev/zero"), "is a character device"),
    "link to a fifo": (lambda path: (os.mkfifo(path.parent / "pipe"), path.symlink_to("pipe")), "is a FIFO"),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_files_are_named_and_nobody_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make, says = SPECIAL[name]
    root = image_folder(tmp_path / "d")
    make(root / "train" / "rose" / "x.jpg")
    facts = source(root).facts(1)
    assert facts.train_samples == 18
    assert facts.attention == f"1 name is passed over: {root}/train/rose/x.jpg {says}"
    with pytest.raises(OSError, match=f"{says} and not a regular file"):
        read_regular(root / "train" / "rose" / "x.jpg")
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(root / "train" / "rose" / "x.jpg")
    files, again = images_in(root / "train" / "rose")
    assert "x.jpg" in files and not again, "mode=predict gives it a row, which says what it is"


def test_a_file_that_becomes_a_fifo_later_is_not_waited_for(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "d")
    folder = source(root, cache="none")
    train = folder.open(folder.facts(1)).train
    (root / "train" / "daisy" / "0.jpg").unlink()
    os.mkfifo(root / "train" / "daisy" / "0.jpg")
    with pytest.raises(RunFailed, match=r"daisy/0\.jpg cannot be read: is a FIFO and not a regular file\."):
        train.image(0)


LOOPS: dict[str, tuple[str, str]] = {
    "to its class": ("train/daisy/loop", "."),
    "to all classes": ("train/daisy/loop", ".."),
    "to the data": ("train/daisy/loop", "../.."),
    "to the root": ("train/daisy/loop", "/"),
    "beside the classes": ("train/loop", "."),
    "in validation": ("val/rose/loop", "../.."),
    "to itself": ("train/daisy/loop.jpg", "loop.jpg"),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_links_does_not_multiply_the_images(tmp_path: Path, name: str) -> None:
    place, target = LOOPS[name]
    root = image_folder(tmp_path / "d")
    truth = source(root).listings(None)  # type: ignore[arg-type]
    (root / place).symlink_to(target)
    if name == "to itself":
        with pytest.raises(UserError, match="1 of its training images is a link that leads nowhere"):
            source(root).facts(1)
    facts = source(root, on_bad="skip").facts(1)
    assert (facts.train_samples, facts.val_samples, facts.classes) == (18, 6, 3)
    assert str(root / place) in facts.attention
    for ours, theirs in zip(source(root).listings(facts), truth, strict=True):
        assert ours.names == theirs.names and ours.labels.tolist() == theirs.labels.tolist()


def test_many_links_to_one_folder_are_walked_once(tmp_path: Path) -> None:
    """Two links to ``.`` make 2^depth paths, ten links to one another 10!."""
    root = image_folder(tmp_path / "d")
    for link in "ab":
        (root / "train" / "daisy" / link).symlink_to(".")
    folders = [root / "train" / "rose" / f"{n}" for n in range(10)]
    for folder in folders:
        folder.mkdir()
        (folder / "p.jpg").write_bytes(encoded(picture(0, 0)))
    for folder in folders:
        for other in folders:
            (folder / f"to{other.name}").symlink_to(other)
    facts = source(root).facts(1)
    assert facts.train_samples == 18 + 10
    assert facts.attention.startswith("102 names are passed over: ")
    assert len(images_in(root / "train")[0]) == 28


def test_linked_folders_and_files_elsewhere_are_followed_once(tmp_path: Path) -> None:
    """A set made of links into another folder is a usual one; links to the same image, or train and val in one, are
    not."""
    real = image_folder(tmp_path / "real", per_class=4)
    root = tmp_path / "d"
    for split in ("train", "val"):
        for name in CLASSES:
            (root / split / name).mkdir(parents=True)
            for file in sorted((real / split / name).iterdir()):
                (root / split / name / file.name).symlink_to(file)
    facts = source(root).facts(1)
    assert (facts.train_samples, facts.val_samples, facts.attention) == (12, 6, "")
    (root / "train" / "daisy" / "again.jpg").symlink_to(real / "train" / "daisy" / "0.jpg")
    os.link(real / "train" / "rose" / "1.jpg", root / "train" / "rose" / "hard.jpg")
    (root / "val" / "iris" / "seen.jpg").symlink_to(real / "train" / "iris" / "3.jpg")
    facts = source(root).facts(1)
    assert (facts.train_samples, facts.val_samples) == (12, 7)
    for says in (
        "daisy/again.jpg is ",
        "2 names are passed over",
        "1 of 7 validation images are training images as well",
        "iris/seen.jpg is ",
    ):
        assert says in facts.attention, facts.attention
    (root / "train" / "rose" / "gone.jpg").symlink_to("nowhere")
    whole = source(root / "train", on_bad="skip").facts(1)  # without a folder for validation: one listing, divided
    assert whole.train_samples + whole.val_samples == 12
    assert whole.attention.count("again.jpg") == 1 and "training images as well" not in whole.attention
    assert "1 image is a link that leads nowhere" in whole.attention
    (root / "train" / "rose" / "gone.jpg").unlink()
    (tmp_path / "linked").symlink_to(real)
    assert source(tmp_path / "linked").facts(1).train_samples == 12


def test_links_that_lead_nowhere_are_refused_or_left_out_and_said(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "d")
    for n in range(7):
        (root / "train" / "iris" / f"gone{n}.jpg").symlink_to("/nowhere/at/all.jpg")
    with pytest.raises(
        UserError, match=r"7 of its training images are links that lead nowhere: .*iris/gone0\.jpg; .*; and 2 more"
    ) as caught:
        source(root).facts(1)
    assert "data.on_bad=skip" in caught.value.instead
    facts = source(root, on_bad="skip").facts(1)
    assert facts.train_samples == 18 and facts.attention.startswith("7 images are links that lead nowhere: ")


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = image_folder(tmp_path / "d")
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("train/iris"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match=r"train/iris: cannot be read: Permission denied\."):
        source(root).facts(1)


def test_empty_class_folders_are_refused(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "d")
    (root / "train" / "tulip").mkdir()
    (root / "train" / "lily").mkdir()
    (root / "train" / "lily" / "notes.txt").write_text("later")
    with pytest.raises(
        UserError, match=r"2 of 5 classes have no training images: lily; tulip\. Type instead: put images"
    ):
        source(root).facts(1)
    with pytest.raises(UserError, match="2 of 5 classes have no training images: lily; tulip"):
        source(root / "train").facts(1)


def test_a_class_of_validation_that_training_has_no_image_of_is_refused(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "d", classes=["iris", "rose", "tulip"])
    for file in (root / "train" / "tulip").iterdir():
        file.unlink()
    with pytest.raises(UserError, match="1 of 3 classes have no training images: tulip"):
        source(root).facts(1)
    (root / "train" / "tulip").rmdir()
    with pytest.raises(UserError, match=r"has classes that .*train does not have: tulip"):
        source(root).facts(1)


def test_a_class_without_validation_images_is_said(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "d")
    for file in (root / "val" / "rose").iterdir():
        file.unlink()
    assert source(root).facts(1).attention == "1 of 3 classes have no validation images: rose"
    (root / "val" / "rose").rmdir()
    assert source(root).facts(1).attention == "1 of 3 classes have no validation images: rose"
    alone = image_folder(tmp_path / "one", per_class=5) / "train"
    for n in range(1, 5):
        (alone / "iris" / f"{n}.jpg").unlink()
    assert source(alone).facts(1).attention == "1 of 3 classes have no validation images: iris"


def test_a_class_of_broken_images_alone_is_refused_and_named(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "d")
    for file in (root / "train" / "iris").iterdir():
        file.write_bytes(b"no image")
    folder = source(root, cache="none", verify=True, on_bad="skip")
    with pytest.raises(UserError, match=r"no training image is left of iris: 6 of 24 images cannot be decoded"):
        folder.prepare(folder.facts(1), silent)


@pytest.mark.parametrize("readers", [0, 1, 2])
@pytest.mark.parametrize("what", ["gone", "cut", "a folder"])
def test_a_file_that_breaks_while_it_is_read_is_one_sentence(tmp_path: Path, readers: int, what: str) -> None:
    root = image_folder(tmp_path / "d")
    folder = source(root, cache="none")
    splits = folder.open(folder.facts(1))
    place = Placement(splits, torch.device("cpu"), torch.float32, False)
    sampler = DistributedBatchSampler(18, 3, shuffle=False)
    feed = Feed(splits, sampler, EvaluationSampler(6, 2), place, reading=Reading(num_workers=readers, prefetch=1))
    path = root / "train" / "rose" / "4.jpg"
    content = path.read_bytes()
    path.unlink()
    if what == "cut":
        path.write_bytes(content[:200])
    elif what == "a folder":
        path.mkdir()
    try:
        with pytest.raises(RunFailed) as caught:
            for _, batches in feed.updates(0):
                list(batches)
    finally:
        feed.close()
    says = {"gone": "No such file or directory", "cut": "", "a folder": "is a folder and not a regular file"}[what]
    said = str(caught.value)
    assert said.startswith(f"{path} cannot be read: {says}") and said.endswith("data.on_bad=skip leaves them out.")
    assert "\n" not in said and "Traceback" not in said and ".. " not in said


def test_a_reading_process_that_is_killed_is_one_sentence(tmp_path: Path) -> None:
    import signal

    folder = source(image_folder(tmp_path / "d"), cache="none")
    splits = folder.open(folder.facts(1))
    place = Placement(splits, torch.device("cpu"), torch.float32, False)
    feed = Feed(
        splits,
        DistributedBatchSampler(18, 1, shuffle=False),
        EvaluationSampler(6, 2),
        place,
        reading=Reading(num_workers=1, prefetch=1),
    )
    try:
        updates = feed.updates(0)
        list(next(updates)[1])
        (reader,) = feed.reader.loader._iterator._workers  # type: ignore[union-attr]
        os.kill(reader.pid, signal.SIGKILL)
        with pytest.raises(RunFailed, match=r"^a reading process has died: .*(Killed|exited unexpectedly)"):
            for _, batches in updates:
                list(batches)
    finally:
        feed.close()


@pytest.mark.parametrize(
    "error", [EOFError(), ConnectionResetError(104, "reset"), ConnectionRefusedError(111, "refused")]
)
def test_a_reading_process_that_dies_while_it_hands_a_batch_over_is_one_sentence(error: Exception) -> None:
    """Only a race shows it for real: the batch's memory is asked of a process that is gone."""

    def batches() -> Iterator[int]:
        yield 1
        raise error

    got = from_processes(batches())
    assert next(got) == 1
    with pytest.raises(RunFailed, match=r"^a reading process has died: .*\(fewer: data\.num_workers=1\)"):
        next(got)


def test_the_death_of_a_reading_process_is_one_sentence_wherever_torch_raises_it() -> None:
    """Torch raises it from a signal's handler, in whatever the training does then."""
    with pytest.raises(RunFailed, match=r"^a reading process has died: "), deaths_named():
        raise RuntimeError("DataLoader worker (pid 11251) is killed by signal: Killed. ")
    with pytest.raises(RuntimeError, match="another"), deaths_named():
        raise RuntimeError("another mistake")


def test_names_that_are_not_utf_8_are_read_and_can_be_written(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "d")
    strange = os.fsencode(root / "train" / "rose") + b"/b\xff\xe9.jpg"
    Path(os.fsdecode(strange)).write_bytes(encoded(picture(2, 7)))
    os.mkdir(os.fsencode(root / "train") + b"/z\xfe")
    os.link(strange, os.fsencode(root / "train") + b"/z\xfe/1.jpg")
    with pytest.raises(
        UserError, match=r"no training images: z\\xfe .*z\\xfe/1\.jpg is .*rose/b\\xff\\xe9\.jpg by another name"
    ) as caught:
        source(root).facts(1)
    str(caught.value).encode()
    os.unlink(os.fsencode(root / "train") + b"/z\xfe/1.jpg")
    Path(os.fsdecode(os.fsencode(root / "train") + b"/z\xfe/2.jpg")).write_bytes(encoded(picture(1, 7)))
    for cache in ("none", "ram"):
        folder = source(root, cache=cache)
        facts = folder.prepare(folder.facts(1), silent)
        train = folder.open(facts).train
        assert (facts.train_samples, facts.classes) == (20, 4)
        assert folder.class_names(facts)[-1] == "z\\xfe" and train.listing.names[-1].endswith("z\\xfe/2.jpg")
        assert torch.equal(train.image(19), decode(encoded(picture(1, 7))))
        assert len(folder.fingerprint(facts)) == 32
