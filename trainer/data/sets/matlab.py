"""Reads arrays of numbers from a MATLAB 5 file as Flowers-102 has them, within a limit on memory.

A parser of its own instead of ``scipy.io.loadmat``, which follows cells in cells as deep as a file has them, and
unpacks whatever a packed element becomes. The layout: MAT-File Level 5 of MATLAB's "MAT-File Format".
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator

import numpy as np

HEADER = 128
MATRIX, COMPRESSED = 14, 15
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
"""Kinds of elements that hold numbers."""
ARRAYS = range(6, 16)
"""Classes of matrices of numbers: double, single, and whole ones."""
COMPLEX = 0x08


class NotMatlab(Exception):
    """The error for bytes that are no MATLAB 5 file of numeric arrays; its text is the rest of a sentence."""


def arrays(content: bytes, most: int) -> dict[str, np.ndarray]:
    """Read the numeric arrays in a MATLAB 5 file, by name; other contents are skipped.

    Args:
        most: bytes that a packed element may become.

    Raises:
        NotMatlab: it is something else, damaged, or too large.
    """
    if len(content) < HEADER or content[126:128] not in (b"IM", b"MI"):
        raise NotMatlab("it is no MATLAB 5 file")
    order = "<" if content[126:128] == b"IM" else ">"
    found: dict[str, np.ndarray] = {}
    try:
        for kind, data in _elements(content[HEADER:], order):
            if kind == COMPRESSED:
                ((kind, data),) = list(_elements(_unpacked(data, most), order))[:1]
            if kind == MATRIX and (named := _matrix(data, order)) is not None:
                found[named[0]] = named[1]
    except (struct.error, zlib.error, ValueError, IndexError) as error:
        raise NotMatlab("it is cut off or damaged") from error
    return found


def _unpacked(data: bytes, most: int) -> bytes:
    unpacker = zlib.decompressobj()
    whole = unpacker.decompress(data, most)
    if unpacker.unconsumed_tail:
        raise NotMatlab(f"an array in it is larger than {most:,} bytes when it is unpacked")
    return whole


def _elements(content: bytes, order: str) -> Iterator[tuple[int, bytes]]:
    """Kind and data of each element; small ones have their length in the upper half of the kind."""
    place = 0
    while place + 8 <= len(content):
        kind, length = struct.unpack_from(f"{order}2I", content, place)
        if kind >> 16:
            kind, length, start, end = kind & 0xFFFF, kind >> 16, place + 4, place + 8
        else:
            start = place + 8
            end = start + (length if kind == COMPRESSED else -(-length // 8) * 8)
        if start + length > len(content):
            raise NotMatlab("it is cut off")
        yield kind, content[start : start + length]
        place = end


def _matrix(data: bytes, order: str) -> tuple[str, np.ndarray] | None:
    """Name and values; None where it holds something else than real numbers."""
    parts = _elements(data, order)
    flags = struct.unpack_from(f"{order}I", next(parts, (0, b""))[1])[0]
    if flags & 0xFF not in ARRAYS or flags >> 8 & COMPLEX:
        return None
    rest = list(parts)[:3]
    if len(rest) < 3:
        raise NotMatlab("it is cut off")
    sizes, name, (kind, values) = rest[0][1], rest[1][1].decode("latin-1"), rest[2]
    shape = struct.unpack(f"{order}{len(sizes) // 4}i", sizes)
    numbers = np.frombuffer(values, order + NUMBERS[kind]) if kind in NUMBERS else np.zeros(0)
    if not 1 <= len(shape) <= 8 or min(shape) < 0 or len(numbers) != math.prod(shape):
        raise NotMatlab(f"its {name!r} has {len(numbers)} numbers for a shape of {shape}")
    return name, numbers.reshape(shape, order="F")
