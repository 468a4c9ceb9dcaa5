"""Criteo rows converted once into arrays on disk, which workers map into memory and read by index."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from trainer.data.criteo.blocks import RowCounts, Split, blocks_of, rows_of
from trainer.data.criteo.parse import DENSE, REFERENCE, SLOTS, Parsed, Spans
from trainer.data.prepared import known, prepare_once

VERSION = 2
WHOLE = 1 << 40


@dataclass(frozen=True)
class Converted:
    """The note of a finished conversion: rows of each split, bad lines and the first few of them, files with a
    header."""

    rows: dict[str, int]
    bad: int
    named: list[str]
    headers: list[str]


@dataclass(frozen=True)
class Conversion:
    """The conversion of click-log files into cached arrays; files and options together name a folder of the cache.

    Attributes:
        splits: files and rows of each split, by its name.
        hash_size: ids are below it; None: below 2^63.
        root: folder of all conversions.
        spans: of the integers.
    """

    splits: dict[str, Split]
    hash_size: int | None
    root: Path
    spans: Spans = REFERENCE

    def folder(self) -> Path:
        """The cache folder for the arrays, whether or not they exist; it changes when a source file changes."""
        stats = {str(p): p.stat() for split in self.splits.values() for p in split.files}
        known = {
            "version": VERSION,
            "hash_size": self.hash_size,
            "files": {name: [str(p) for p in split.files] for name, split in self.splits.items()},
            "stats": {name: (s.st_size, s.st_mtime_ns) for name, s in stats.items()},
            "parts": {name: asdict(split.rows) for name, split in self.splits.items()},
            "spans": asdict(self.spans),
        }
        digest = hashlib.blake2b(json.dumps(known, sort_keys=True).encode(), digest_size=12).hexdigest()
        return self.root / digest

    def done(self) -> Converted | None:
        """Return the note of the finished conversion, or None if it is not finished."""
        found = known(self.folder())
        return None if found is None else Converted(**found)

    def convert(self, most_bad: float, on_progress: Callable[[int, int], None]) -> Converted:
        """Convert the text into arrays unless they exist; one of several processes does it while the others wait.

        Args:
            most_bad: greatest share of malformed lines.
            on_progress: called with the MiB done and in all.

        Raises:
            UserError: too many lines are malformed, or a file is broken; nothing is left then.
        """
        found = Converted(**prepare_once(self.folder(), lambda part: asdict(self._write(part, most_bad, on_progress))))
        RowCounts(sum(found.rows.values()), found.bad, found.named).check(most_bad)
        return found

    def _write(self, folder: Path, most_bad: float, on_progress: Callable[[int, int], None]) -> Converted:
        """One pass over each list of files, all splits of it written side by side."""
        sources = list(dict.fromkeys(tuple(split.files) for split in self.splits.values()))
        writers = {name: RowWriter(folder / name, self.hash_size) for name in self.splits}
        tally, done, total = RowCounts(), 0, sum(p.stat().st_size for files in sources for p in files)
        for source in sources:
            names = [name for name, split in self.splits.items() if tuple(split.files) == source]
            for block in blocks_of(list(source), WHOLE):
                for parsed, start in rows_of(block, self.hash_size, tally, self.spans):
                    for name in names:
                        writers[name].add(parsed, self.splits[name].rows.chosen(parsed.offsets + start, block.number))
                    unpacked = block.end is None
                    now = done if unpacked else done + start
                    on_progress(now >> 20, max(1, total >> 20))
                done += block.path.stat().st_size
        on_progress(max(1, total >> 20), max(1, total >> 20))
        rows = {name: writer.close() for name, writer in writers.items()}
        tally.check(most_bad)
        return Converted(rows, tally.bad, tally.named, tally.headers)


def _id_type(hash_size: int | None) -> type[np.integer[Any]]:
    """The numpy integer type in which ids are stored on disk: int32 if they fit, else int64."""
    return np.int32 if hash_size is not None and hash_size <= 2**31 else np.int64


class RowWriter:
    """Appends click rows to the three array files (label, dense, sparse) of a split."""

    def __init__(self, folder: Path, hash_size: int | None) -> None:
        folder.mkdir()
        self.ids = _id_type(hash_size)
        self.rows = 0
        self.files: list[IO[bytes]] = [(folder / name).open("wb") for name in ("label", "dense", "sparse")]

    def add(self, parsed: Parsed, chosen: np.ndarray) -> None:
        """Append the chosen rows of a parsed block."""
        self.rows += int(chosen.sum())
        arrays = (parsed.labels, parsed.dense, parsed.sparse.astype(self.ids))
        for file, array in zip(self.files, arrays, strict=True):
            file.write(array[chosen].tobytes())

    def close(self) -> int:
        """Close the files and return the number of rows written."""
        for file in self.files:
            file.close()
        return self.rows


class CriteoArrays(Dataset[Any]):
    """The data set of a split's click rows: ``dense`` (N, 13) float32, ``sparse`` (N, 26) int64 and labels (N,)."""

    def __init__(self, folder: Path, rows: int, hash_size: int | None) -> None:
        self.rows = rows
        self.labels = _mapped(folder / "label", np.uint8, (rows,))
        self.dense = _mapped(folder / "dense", np.float32, (rows, DENSE))
        self.sparse = _mapped(folder / "sparse", _id_type(hash_size), (rows, SLOTS))

    def __len__(self) -> int:
        return self.rows

    def batch(self, indices: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return the click rows with these indices (a list or an integer array) as one batch."""
        chosen = np.asarray(indices)
        inputs = {
            "dense": torch.from_numpy(self.dense[chosen]),
            "sparse": torch.from_numpy(self.sparse[chosen].astype(np.int64)),
        }
        return inputs, torch.from_numpy(self.labels[chosen].astype(np.int64))


def _mapped(path: Path, kind: type[Any], shape: tuple[int, ...]) -> np.ndarray:
    """The file as an array that is read as it is used; an empty file cannot be mapped."""
    return np.memmap(path, kind, "r", shape=shape).view(np.ndarray) if shape[0] else np.zeros(shape, kind)
