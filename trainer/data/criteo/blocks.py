"""Cuts Criteo files into blocks of rows, reads a block in pieces, and counts and refuses bad lines."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np

from trainer.data.criteo.format_diagnosis import EMPTY_WORDS, diagnose
from trainer.data.criteo.parse import DENSE, FIELDS, REFERENCE, Parsed, Spans, parse
from trainer.data.regular_files import is_packed, open_unpacked
from trainer.errors import UserError, why
from trainer.hashing import mixed

PIECE = 1 << 20
LONGEST_LINE = 16 << 20
MOST_NAMED = 5
BOM = b"\xef\xbb\xbf"
"""Byte-order mark at the beginning of a UTF-8 text, which is no part of a row."""


@dataclass(frozen=True)
class Block:
    """A block of one file: the lines whose first byte is in [``start``, ``end``); ``end=None``: to the end of file."""

    path: Path
    number: int
    start: int
    end: int | None


def blocks_of(files: list[Path], size: int) -> list[Block]:
    """Cut Criteo's files into blocks: plain text every ``size`` bytes; each file that gzip has packed is one block."""
    found = []
    for number, path in enumerate(files):
        if is_packed(path):
            found.append(Block(path, number, 0, None))
            continue
        length = path.stat().st_size
        found += [Block(path, number, start, min(start + size, length)) for start in range(0, length, size)]
    return found


def pieces(block: Block, key: str = "data.path") -> Iterator[tuple[int, bytes]]:
    """Read a block of a Criteo file in pieces of whole lines, about 1 MiB each, with their offset in the unpacked file.

    Args:
        key: that names the file, for messages.

    Raises:
        UserError: the file is broken, or has no lines.
    """
    try:
        with open_unpacked(block.path) as file:
            yield from _lines(file, block, key)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{key}={block.path}", f"cannot be read: {why(error)}") from error


def _lines(file: IO[bytes], block: Block, key: str) -> Iterator[tuple[int, bytes]]:
    place = block.start
    if block.start:  # a line that begins before the block is the one's before it
        file.seek(block.start - 1)
        place += len(file.readline(LONGEST_LINE)) - 1
    rest = b""
    while block.end is None or place < block.end:
        got = file.read(PIECE)
        text = rest + got
        if place == 0 and text.startswith(BOM):
            place, text = len(BOM), text[len(BOM) :]
        cut = _cut(text, place, block.end, last=not got)
        if cut:
            lines = text[:cut]
            yield place, lines if lines.endswith(b"\n") else lines + b"\n"
            place += cut
        rest = text[cut:]
        if not got:
            return
        if len(rest) > LONGEST_LINE:
            raise UserError(
                f"{key}={block.path}", f"has no end of line within {LONGEST_LINE >> 20} MiB: it is no text file"
            )


def _cut(text: bytes, place: int, end: int | None, last: bool) -> int:
    """The bytes of ``text`` that are whole lines which begin before ``end``; ``last``: the file ends here."""
    if end is not None and place + len(text) >= end:
        newline = text.find(b"\n", max(0, end - place - 1))
        if newline >= 0:
            return newline + 1
    return len(text) if last else text.rfind(b"\n") + 1


@dataclass
class RowCounts:
    """Counts the rows and the bad lines of click logs, and remembers where the first few bad ones are.

    Attributes:
        headers: files whose first line names the columns, and is no row.
        broken: the file of the first bad line.
    """

    rows: int = 0
    bad: int = 0
    named: list[str] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    broken: Path | None = None

    def add(self, parsed: Parsed, path: Path, where: str, lines_before: int) -> None:
        """Count the rows of a parsed piece; ``where`` is its place in the file, for naming its bad lines (from 1)."""
        self.rows += len(parsed.labels)
        self.bad += len(parsed.bad)
        if parsed.bad and self.broken is None:
            self.broken = path
        for line, reason in parsed.bad[: max(0, MOST_NAMED - len(self.named))]:
            self.named.append(f"{where}:{lines_before + line + 1}: {reason}")

    def check(self, most: float) -> None:
        """Refuse data with too large a share of malformed lines, or without any row.

        Raises:
            UserError: with the first few bad lines, and what mends them.
        """
        total = self.rows + self.bad
        if self.bad > most * total:
            diagnosis = None if self.broken is None else diagnose(self.broken)
            share = min(1.0, self.bad / total * 1.1)
            left_out = f"data.max_bad_fraction={share:.2g} if they may be left out"
            what = "" if diagnosis is None else f"{diagnosis.what}; "
            raise UserError(
                f"data.max_bad_fraction={most:g}",
                (
                    f"{what}{self.bad} of {total} lines are not rows of a label, 13 integers and 26 tokens: "
                    f"{'; '.join(self.named)}"
                ),
                left_out if diagnosis is None else diagnosis.remedy,
            )
        if not self.rows:
            raise UserError("data.path", "there is not one row in it")


@dataclass(frozen=True)
class SplitRows:
    """Selects the rows that belong to a split: all rows, or one side of a division by a hash of each row's place.

    Attributes:
        fraction: share of the rows that is held out; 0: none.
        held_out: this part is the held-out one.
    """

    fraction: float = 0.0
    held_out: bool = False

    def chosen(self, offsets: np.ndarray, number: int) -> np.ndarray:
        """A mask (N,) of the rows that belong to this split; ``offsets`` (N,): their first bytes in file ``number``."""
        if not self.fraction:
            return np.full(len(offsets), not self.held_out)
        key = np.uint64((number + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
        share = (mixed(offsets.astype(np.uint64) ^ key) >> np.uint64(11)) * 2.0**-53
        chosen: np.ndarray = (share < self.fraction) == self.held_out
        return chosen


@dataclass(frozen=True)
class Split:
    """The rows of a split: some or all rows of its files."""

    files: list[Path]
    rows: SplitRows = SplitRows()


def rows_of(
    block: Block, hash_size: int | None, tally: RowCounts, spans: Spans = REFERENCE
) -> Iterator[tuple[Parsed, int]]:
    """Read and parse a block of a Criteo file, piece by piece; bad lines are counted and left out.

    A bad line's name is ``file:line``, or in a block that begins within the file ``file, from byte N:line``.
    """
    where = f"{block.path}, from byte {block.start}" if block.start else str(block.path)
    lines = 0
    for place, text in pieces(block):
        header = 0 if lines or block.start else header_of(text)
        if header:
            tally.headers.append(str(block.path))
            lines = 1
        parsed = parse(text[header:], hash_size, spans=spans)
        tally.add(parsed, block.path, where, lines)
        lines += parsed.lines
        yield parsed, place + header


def sampled(path: Path, text: bytes, tally: RowCounts) -> Parsed:
    """Parse the first lines of a file, but for a header, and count them."""
    header = header_of(text)
    parsed = parse(text[header:], None)
    tally.add(parsed, path, str(path), int(header > 0))
    return parsed


def header_of(text: bytes) -> int:
    """The bytes of a file's first line if it names columns: its label and its 13 integers are words. Else 0."""
    line, newline, _ = text.partition(b"\n")
    fields = line.split(b"\t")
    words = all(re.match(rb"[^\W\d]", name) and name.lower() not in EMPTY_WORDS for name in fields[: 1 + DENSE])
    return len(line) + len(newline) if len(fields) == FIELDS and words else 0
