"""Writes a safetensors file piece by piece, so that no tensor has to be in memory as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

KINDS = {"float64": "F64", "float32": "F32", "int64": "I64", "int32": "I32", "uint8": "U8", "bool": "BOOL"}
"""Names of dtypes in safetensors files."""
PIECE = 4 << 20
"""Approximate bytes of a piece."""


@dataclass(frozen=True)
class Streamed:
    """A tensor whose values are made while they are written.

    Attributes:
        shape, dtype: of the tensor. pieces: makes its values in order, cut along the first dimension.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    pieces: Callable[[], Iterable[np.ndarray]]

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def whole(self) -> np.ndarray:
        """The whole tensor as one array."""
        made = np.concatenate([np.zeros((0, *self.shape[1:]), self.dtype), *self.pieces()])
        return made.reshape(self.shape)


def of(array: np.ndarray) -> Streamed:
    """A tensor to write: an array, which is not copied."""
    return Streamed(array.shape, array.dtype, lambda: [array])


def rows_of(array: np.ndarray, places: Callable[[], np.ndarray], count: int) -> Streamed:
    """A tensor to write: ``count`` rows of an array (N, ...), copied when their piece is written.

    Args:
        places: returns the indices of the rows (count,); called when writing begins.
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
        OSError: the file cannot be written.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # each is aligned
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
