"""The first rows of click-log files: whether they are rows at all, about how many there are, and their numbers."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.criteo.blocks import Block, RowCounts, Split, pieces, sampled
from trainer.data.criteo.format_diagnosis import diagnose
from trainer.data.criteo.parse import DENSE
from trainer.data.regular_files import is_packed
from trainer.errors import UserError

SAMPLE = 1 << 18
"""Bytes of each file that are parsed."""
LONG_ENOUGH = 1 << 19
MOST_BAD = 0.1
"""Share of the first lines that may be bad before all lines are counted."""


@dataclass
class FirstRows:
    """The first rows of some files.

    Attributes:
        tally: counts of good and bad lines; counts: estimated rows of each file; integers: (N, 13), NaN where empty.
    """

    tally: RowCounts = field(default_factory=RowCounts)
    counts: dict[Path, float] = field(default_factory=dict)
    integers: np.ndarray = field(default_factory=lambda: np.zeros((0, DENSE)))


def read(files: Sequence[Path]) -> FirstRows:
    """Parse the first rows of each file."""
    found, integers = FirstRows(), []
    for path in files:
        _, text = next(pieces(Block(path, 0, 0, None)), (0, b""))
        integers.append(sampled(path, text[: text.rfind(b"\n", 0, SAMPLE) + 1] or text, found.tally).integers)
        found.counts[path] = _rows(path, text)
    found.integers = np.concatenate(integers) if integers else found.integers
    return found


def _rows(path: Path, text: bytes) -> float:
    """About how many rows a file has that begins with ``text``."""
    size, lines = path.stat().st_size, text.count(b"\n")
    if not is_packed(path):
        return size / max(1, len(text)) * lines
    packed = len(zlib.compress(text, 6))
    return (1.0 if len(text) < LONG_ENOUGH else max(1.0, size / packed)) * lines


def estimate(found: FirstRows, splits: Mapping[str, Split]) -> dict[str, int]:
    """About how many rows each split has, from the sizes of the files and the length of their first lines."""
    rows = {}
    for name, split in splits.items():
        share = split.rows.fraction if split.rows.held_out else 1.0 - split.rows.fraction
        rows[name] = max(1, round(share * sum(found.counts[path] for path in split.files)))
    return rows


def check(found: FirstRows, path: Any, most_bad: float) -> None:
    """Refuse files most of whose first lines are no rows, or many where it is known what mends them.

    Raises:
        UserError: with the first of these lines, and the command that mends them.
    """
    tally = found.tally
    lines = tally.bad + tally.rows
    if tally.bad <= max(most_bad, MOST_BAD) * lines:
        return
    diagnosis = None if tally.broken is None else diagnose(tally.broken)
    if diagnosis is None and tally.bad <= tally.rows:  # perhaps the beginning of a file is worse than the rest
        return
    what = "" if diagnosis is None else f": {diagnosis.what}"
    raise UserError(
        f"data.path={path}",
        (
            f"is not in Criteo's format, a label, 13 integers and 26 tokens separated by tabs{what}: "
            f"{'; '.join(tally.named[:2])}"
        ),
        "" if diagnosis is None else diagnosis.remedy,
    )
