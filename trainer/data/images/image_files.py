"""Decides which files are images: by suffix, and by their first bytes where there is none that is known."""

from __future__ import annotations

import os
from collections.abc import Callable

from trainer.data.regular_files import open_regular
from trainer.visible import one_line, shortened
from trainer.wording import counted, some

JPEG = (".jpg", ".jpeg", ".jpe", ".jfif", ".jfi", ".jif", ".pjpeg", ".pjp", ".mpo")
EXTENSIONS = (*JPEG, *".png .apng .webp .bmp .dib .tif .tiff .ppm .pgm .pbm .pnm .gif .avif".split())
"""Suffixes of images that are read. Their contents are checked when a file is opened."""
HEIC = (".heic", ".heif", ".hif")
UNREAD = (
    *HEIC,
    *"""
    .jp2 .j2k .jpf .jpx .jxl .svg .svgz .ico .icns .cur .tga .psd .eps .ai .exr .hdr .pcx .dds .pfm .xbm .xcf .fits
    .dcm .dicom .nii .emf .wmf .raw .dng .cr2 .cr3 .nef .arw .orf .rw2 .raf .pef .srw
    """.split(),
)
"""Suffixes of images that cannot be read."""
HEIC_HELP = "the package pillow-heif opens them for Pillow, which saves them as JPEG"
OTHERS = frozenset(
    """
    .txt .xml .json .jsonl .csv .tsv .md .html .htm .yaml .yml .toml .ini .db .log .py .ipynb .npy .npz .mat .pt
    .pth .pkl .parquet .xlsx .xls .pdf .url .lnk .cls .zip .tar .gz .tgz .mp4 .mov .avi .mp3 .wav .sqlite .lock
    """.split()
)
"""Suffixes of files that are no images, and are not opened."""
MAGIC = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"P4\n": "PBM",
    b"P5\n": "PGM",
    b"P6\n": "PPM",
}
"""First bytes of an image -> its kind."""
HEADER = 16
"""First bytes of a file by which the kind of an image is known."""


def suffix(name: str) -> str:
    """A file name's suffix in lower case with its dot; '' without one, also for ``.jpg``, which is a hidden file's
    name."""
    return os.path.splitext(name)[1].lower()


def is_image(path: str) -> bool:
    """Whether a file's name ends like that of an image that is read."""
    return suffix(path) in EXTENSIONS


def kind_by_contents(head: bytes) -> str:
    """The kind of image that begins with these ``HEADER`` bytes; '' for anything else."""
    if kind := next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), ""):
        return kind
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WebP"
    if head[:2] == b"BM" and head[6:10] == b"\0\0\0\0":
        return "BMP"
    if head[4:8] == b"ftyp":
        brand = head[8:12]
        return (
            "AVIF" if brand in (b"avif", b"avis") else "HEIC" if brand in (b"heic", b"heix", b"mif1", b"msf1") else ""
        )
    return ""


class ImageFiles:
    """Decides file by file what is used as an image, and counts the images that are not used, by suffix and kind."""

    def __init__(self) -> None:
        self._unused: dict[tuple[str, str], list[str]] = {}

    def uses(self, name: str, head: Callable[[], bytes], archive: str = "") -> bool:
        """Whether a file is used as an image: by its suffix, or without one by its contents.

        Args:
            head: reads the file's first ``HEADER`` bytes; called only where the suffix is none that is known.
            archive: the file that holds this one.
        """
        ending, kind = suffix(name), ""
        if ending in EXTENSIONS:
            return True
        if ending in OTHERS:
            return False
        if ending not in UNREAD:
            kind = kind_by_contents(head())
            if not ending and kind not in ("", "HEIC"):
                return True
        if ending in UNREAD or kind:
            self._unused.setdefault((ending, kind), []).append(f"{archive}:{name}" if archive else name)
        return False

    def unused(self) -> list[str]:
        """The images that are not used, by suffix: how many, the first of them, and what helps."""
        return [_of_suffix(*kind, names) for kind, names in self._unused.items()]

    def said(self) -> tuple[str, ...]:
        """A sentence about all images that are not used, if there are any."""
        total = sum(map(len, self._unused.values()))
        return (
            (f"{counted(total, 'image')} {'is' if total == 1 else 'are'} not used: {some(self.unused())}",)
            if total
            else ()
        )


def _of_suffix(ending: str, kind: str, names: list[str]) -> str:
    helps = f" ({HEIC_HELP})" if ending in HEIC or kind == "HEIC" else f" ({kind} by contents)" if kind else ""
    return f"{len(names)} {one_line(ending) or 'without a suffix'}{helps}, e.g. {shortened(one_line(names[0]))}"


def head_of(path: str) -> bytes:
    """The first ``HEADER`` bytes of a file; none where it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(HEADER)
    except OSError:
        return b""
