"""A safetensors file that is written piece by piece, so that no tensor of it has to be in memory as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

KINDS = {"float64": "F64", "float32": "F32", "int64": "I64", "int32": "I32", "uint8": "U8", "bool": "BOOL"}
"""safetensors' names of types."""
PIECE = 4 << 20
"""Bytes of a piece, about."""


@dataclass(frozen=True)
class Streamed:
    """A tensor whose values are looked up while they are written.

    Attributes:
        shape: its own. pieces: makes its values, cut along the first dimension, in their order.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    pieces: Callable[[], Iterable[np.ndarray]]

    @property
    def nbytes(self) -> int:
        """Bytes of all its values."""
        return prod(self.shape) * self.dtype.itemsize

    def whole(self) -> np.ndarray:
        """All values at once."""
        made = np.concatenate([np.zeros((0, *self.shape[1:]), self.dtype), *self.pieces()])
        return made.reshape(self.shape)


def of(array: np.ndarray) -> Streamed:
    """A tensor to write piece by piece: an array that is there, and is not copied."""
    return Streamed(array.shape, array.dtype, lambda: [array])


def rows_of(array: np.ndarray, places: Callable[[], np.ndarray], count: int) -> Streamed:
    """A tensor to write piece by piece: rows of an array (N, ...), copied when their piece is written.

    Args:
        places: (count,) which rows, asked for when the first are written.
    """
    return Streamed((count, *array.shape[1:]), array.dtype, partial(_row_pieces, array, places))


def _row_pieces(array: np.ndarray, places: Callable[[], np.ndarray]) -> Iterable[np.ndarray]:
    which = places()
    step = max(1, PIECE // max(1, prod(array.shape[1:]) * array.dtype.itemsize))
    for first in range(0, len(which), step):
        yield array.take(which[first : first + step], axis=0)


def write(path: Path, tensors: Mapping[str, Streamed], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file piece by piece.

    Raises:
        OSError: the disk is full, or will not have it.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # each begins where its type may
    head: dict[str, object] = {"__metadata__": dict(metadata)}
    ends = [0]
    for name in names:
        one = tensors[name]
        ends.append(ends[-1] + one.nbytes)
        head[name] = {"dtype": KINDS[one.dtype.name], "shape": list(one.shape), "data_offsets": ends[-2:]}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        first = file.tell()
        for name, end in zip(names, ends[1:], strict=True):
            for piece in tensors[name].pieces():
                if piece.size:
                    file.write(np.ascontiguousarray(piece).data)
            if file.tell() - first != end:
                raise RuntimeError(f"{name} has changed while it was written")
