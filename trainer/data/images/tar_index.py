"""Finds where the files in a plain tar archive lie, by reading headers alone in one forward pass.

``tarfile`` is not used: it reads headers of any length, follows chains of headers by recursion, and goes back if a size
is negative. It also reads sparse files as whole ones, and ends at a damaged header without an error. Formats: ustar,
GNU's long names, pax's ``path`` and ``size``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from trainer.visible import one_line, shortened

BLOCK = 512
MOST_HEADER = 1 << 20
"""Bytes of a long name or of pax records."""
FILES, LONG_NAME, PAX, SPARSE = b"0\x007", b"L", b"x", b"S"
PACKED = {
    b"\x1f\x8b": "gzip (zcat FILE > NEW.tar)",
    b"BZh": "bzip2 (bzcat FILE > NEW.tar)",
    b"\xfd7zXZ\0": "xz (xzcat FILE > NEW.tar)",
    b"\x28\xb5\x2f\xfd": "zstd (zstdcat FILE > NEW.tar)",
}
"""First bytes of a packed file -> the program that unpacks it."""
ZIP = b"PK\3\4"
WITH_DATA = FILES + b"LKxgXSDMVN"
"""Kinds of members with contents after their header."""


class NotTar(Exception):
    """The error for a file that is no plain tar archive, or is damaged; its text is the rest of a sentence."""


@dataclass(frozen=True)
class TarMember:
    """A file in a tar archive: its name, its first byte, and its length. Sparse files cannot be read."""

    name: str
    start: int
    size: int
    sparse: bool = False


def members(file: IO[bytes], total: int) -> Iterator[TarMember]:
    """List the files in a tar archive of ``total`` bytes, in order, without reading their contents.

    Raises:
        NotTar: it is none, damaged, or cut off.
    """
    place, extended = 0, dict[bytes, bytes]()
    while place < total:
        file.seek(place)
        block = file.read(BLOCK)
        if not block.strip(b"\0"):
            return
        _check(block, place)
        kind, size = block[156:157], _octal(block[124:136])
        if kind in FILES and b"size" in extended:
            size = _decimal(extended[b"size"])
        start = place + BLOCK
        length = size if kind in WITH_DATA else 0
        if start + length > total:
            raise NotTar(
                f"{shortened(_name(block, extended))} ends {start + length - total:,} bytes beyond the end of the file"
            )
        place = start + -(-length // BLOCK) * BLOCK
        if kind in (LONG_NAME, PAX):
            if size > MOST_HEADER:
                raise NotTar(f"it has a header of {size:,} bytes at byte {start - BLOCK}")
            data = file.read(size)
            extended |= _records(data) if kind == PAX else {b"path": data.rstrip(b"\0")}
        elif kind in FILES:
            sparse = any(key.startswith(b"GNU.sparse") for key in extended)
            name = extended.get(b"GNU.sparse.name")
            yield TarMember(one_line(_text(name)) if name else _name(block, extended), start, size, sparse)
            extended = {}
        else:
            if kind == SPARSE:
                yield TarMember(_name(block, extended), start, size, True)
            extended = {} if kind not in (b"K", b"g") else extended


def _check(block: bytes, place: int) -> None:
    """A header tells the sum of its bytes.

    Raises:
        NotTar: this one does not.
    """
    if not place and (packed := next((by for magic, by in PACKED.items() if block.startswith(magic)), "")):
        raise NotTar(f"it is packed by {packed}, and images in it cannot be read where they lie")
    if not place and block.startswith(ZIP):
        raise NotTar("it is a zip archive; unpack it, and pack the images with tar")
    where = f"at byte {place:,}" if place else "at its beginning"
    if len(block) < BLOCK:
        raise NotTar(f"it is cut off {where}")
    others = block[:148] + b" " * 8 + block[156:]
    signed = sum(byte - 256 if byte > 127 else byte for byte in others)  # as some old programs counted
    if _octal(block[148:156]) not in (sum(others), signed):
        raise NotTar(f"it has no header of a member {where}")


def _octal(field: bytes) -> int:
    """A number in a header: octal digits, or bytes after 0x80.

    Raises:
        NotTar: it is negative, or no number.
    """
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if digits.strip(b"01234567"):
        raise NotTar("it has a header with a negative number or none")
    return int(digits or b"0", 8)


def _decimal(digits: bytes) -> int:
    """A number of pax."""
    if not digits.isdigit() or len(digits) > 20:
        raise NotTar("it has damaged pax records")
    return int(digits)


def _records(data: bytes) -> dict[bytes, bytes]:
    """The records of pax: ``length key=value`` and a newline each."""
    records, place = {}, 0
    while place < len(data) and data[place : place + 1] != b"\0":
        space = data.find(b" ", place, place + 20)
        digits = data[place:space]
        if space < 0 or _decimal(digits) <= len(digits) + 1:
            raise NotTar("it has damaged pax records")
        key, equals, value = data[space + 1 : place + int(digits) - 1].partition(b"=")
        if not equals:
            raise NotTar("it has damaged pax records")
        records[key] = value
        place += int(digits)
    return records


def _name(block: bytes, extended: dict[bytes, bytes]) -> str:
    if (path := extended.get(b"path")) is not None:
        return one_line(_text(path))
    name, prefix = block[:100].split(b"\0")[0], block[345:500].split(b"\0")[0]
    return one_line(_text(prefix + b"/" + name if prefix and block[257:263] == b"ustar\0" else name))


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
