"""Parses Criteo's text (label, 13 integers, 26 tokens, separated by tabs) into arrays, a whole block at a time.

A word of eight bytes is read at the start of every field of a block, and all fields are worked on together: digits by
arithmetic within the word, tokens by a hash that takes eight bytes a round. Nothing is done row by row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from trainer.hashing import mixed
from trainer.wording import counted

DENSE, SLOTS = 13, 26
FIELDS = 1 + DENSE + SLOTS
LEAST = np.array([0, -3, *[0] * 11], dtype=np.float64)
SPAN = np.array([20, 603, 100, 50, 64000, 500, 100, 50, 500, 10, 10, 10, 50], dtype=np.float64)
"""A feature x becomes (x - LEAST) / SPAN, an empty one 0: the tables of the reference's reader."""
LONGEST_SHOWN = 40
"""Characters of a wrong field that are shown."""

MOST_DIGITS = 18
LONGEST_ROW = 64 << 10
"""Bytes of a row; a hundred times as long as real ones. Hashing takes a round for each eight bytes of a token."""
TAB, NEWLINE, RETURN, MINUS, ZERO, ONE = b"\t\n\r-01"
WORD = 8


@dataclass(frozen=True)
class Spans:
    """The least value and the span of each of the 13 integers: x becomes (x - least) / span."""

    least: tuple[float, ...]
    span: tuple[float, ...]


REFERENCE = Spans(tuple(LEAST.tolist()), tuple(SPAN.tolist()))


@dataclass
class Parsed:
    """The good rows of a parsed block as arrays, and what is wrong with its bad lines.

    Attributes:
        labels: (N,) uint8; dense: (N, 13) float32; sparse: (N, 26) int64.
        offsets: (N,) int64, the bytes before each good row in its block.
        integers: (N, 13) float64, the numbers as they are written, NaN where a field is empty.
        bad: (number of the line in the block, from 0; what is wrong with it), in the block's order.
        blank: numbers of the lines that are empty: they are neither rows nor bad.
        lines: of the block.
    """

    labels: np.ndarray
    dense: np.ndarray
    sparse: np.ndarray
    offsets: np.ndarray
    integers: np.ndarray
    bad: list[tuple[int, str]] = field(default_factory=list)
    blank: list[int] = field(default_factory=list)
    lines: int = 0


def parse(block: bytes, hash_size: int | None, label: str = "checked", spans: Spans = REFERENCE) -> Parsed:
    """Parse whole lines of click logs, each ended by a newline (or by carriage return and newline).

    Args:
        block: any bytes; empty, or with a newline at the end.
        hash_size: ids are below it; None: below 2^63.
        label: ``checked``: the first field, 0 or 1; ``ignored``: the first field, anything; ``absent``: rows have none.
            Of the last two the labels are 0.
        spans: of the integers.
    """
    before = 0 if label == "absent" else 1
    columns = FIELDS - 1 + before
    text = np.frombuffer(block + bytes(WORD), dtype=np.uint8)
    separators = np.flatnonzero((text[: len(block)] == TAB) | (text[: len(block)] == NEWLINE))
    last = np.flatnonzero(text[separators] == NEWLINE)
    fields = np.diff(last, prepend=-1)
    lines = len(last)
    begins = np.concatenate([[0], separators[last[:-1]] + 1]) if lines else np.zeros(0, dtype=np.int64)
    sizes = separators[last] - begins
    whole = (fields == columns) & (sizes <= LONGEST_ROW)
    ends = (
        separators.reshape(-1, columns) if whole.all() else separators[last[whole][:, None] + np.arange(1 - columns, 1)]
    )
    first = begins[whole]
    starts = np.concatenate([first[:, None], ends[:, :-1] + 1], axis=1)
    lengths = ends - starts
    lengths[:, -1] -= (lengths[:, -1] > 0) & (text[ends[:, -1] - 1] == RETURN)
    words = np.ndarray(len(block) + 1, dtype="<u8", buffer=text, strides=(1,))[starts]

    labels, labelled = _labels(text, starts[:, 0], lengths[:, 0], label == "checked")
    place = slice(before, before + DENSE)
    numbers, numeric = _integers(text, starts[:, place], lengths[:, place], words[:, place])
    empty = lengths[:, place] == 0
    dense = np.where(empty, 0.0, (numbers - np.array(spans.least)) / np.array(spans.span)).astype(np.float32)
    good = labelled & numeric.all(1)
    kept = slice(None) if good.all() else good
    tokens = slice(before + DENSE, columns)
    sparse = _hashed(block, starts[kept, tokens], lengths[kept, tokens], words[kept, tokens], hash_size)
    integers = np.where(empty, np.nan, numbers)[kept]
    blank = np.flatnonzero((fields == 1) & ((sizes == 0) | ((sizes == 1) & (text[begins] == RETURN))))
    bad = _too_long(sizes) + _of_other_length(
        np.setdiff1d(np.flatnonzero((fields != columns) & (sizes <= LONGEST_ROW)), blank), fields, columns
    )
    shown = _Shown(block, starts, lengths, np.flatnonzero(whole))
    bad += [shown.reason(n, 0, "the label is", "not 0 or 1") for n in np.flatnonzero(~labelled).tolist()]
    for n in np.flatnonzero(labelled & ~numeric.all(1)).tolist():
        feature = int(np.argmin(numeric[n]))
        bad.append(shown.reason(n, before + feature, f"integer feature {feature + 1} is", "not an integer"))
    return Parsed(labels[kept], dense[kept], sparse, first[kept], integers, sorted(bad), blank.tolist(), lines)


@dataclass(frozen=True)
class _Shown:
    """Fields of a block as sentences show them. ``lines`` (N,): the line of each row of ``starts`` and ``lengths``."""

    block: bytes
    starts: np.ndarray
    lengths: np.ndarray
    lines: np.ndarray

    def reason(self, row: int, column: int, what: str, why: str) -> tuple[int, str]:
        """The line of a row, and a sentence about one of its fields."""
        start, length = int(self.starts[row, column]), int(self.lengths[row, column])
        field = self.block[start : start + min(length, LONGEST_SHOWN)].decode("utf-8", "backslashreplace")
        return int(self.lines[row]), f"{what} '{field}{'...' if length > LONGEST_SHOWN else ''}', {why}"


def _labels(text: np.ndarray, starts: np.ndarray, lengths: np.ndarray, checked: bool) -> tuple[np.ndarray, np.ndarray]:
    """(N,) labels, and which of them are 0 or 1; where nobody looks at them, zeros."""
    if not checked:
        return np.zeros(len(starts), np.uint8), np.ones(len(starts), bool)
    label = text[starts]
    return label - ZERO, (lengths == 1) & ((label == ZERO) | (label == ONE))


def _too_long(sizes: np.ndarray) -> list[tuple[int, str]]:
    why = f"bytes, more than a row may have ({LONGEST_ROW >> 10} KiB)"
    return [(int(n), f"{sizes[n]:,} {why}") for n in np.flatnonzero(sizes > LONGEST_ROW)]


def _of_other_length(lines: np.ndarray, fields: np.ndarray, columns: int) -> list[tuple[int, str]]:
    return [(int(n), f"{counted(int(fields[n]), 'field')} instead of {columns}") for n in lines]


def _integers(
    text: np.ndarray, starts: np.ndarray, lengths: np.ndarray, words: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Parse decimal fields (empty, or ``-`` and up to 18 digits) as float64; also returns which are valid."""
    negative = (lengths > 0) & ((words & np.uint64(0xFF)) == MINUS)
    digits = lengths - negative
    words = np.where(negative, words >> np.uint64(8), words)
    long = lengths > WORD
    short = np.where(long, 0, digits)
    values, right = _up_to_eight(words, short)
    right &= ~((digits == 0) & negative)
    for place in zip(*np.nonzero(long), strict=True):
        begin = starts[place] + negative[place]
        token = text[begin : begin + digits[place]].tobytes()
        right[place] = digits[place] <= MOST_DIGITS and token.isdigit()
        values[place] = int(token) if right[place] else 0
    return np.where(negative, -1.0, 1.0) * values, right


def _up_to_eight(words: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Parse up to eight digits in a little-endian word by three multiplications (Lemire, 2022, "parsing series of
    integers")."""
    bits = (WORD - lengths).astype(np.uint64) << np.uint64(3)
    zeros = np.uint64(0x3030303030303030)
    empty = lengths == 0
    bits[empty] = 0
    words = (words << bits) | ~(np.uint64(0xFFFFFFFFFFFFFFFF) << bits) & zeros
    words[empty] = zeros
    high = np.uint64(0x8080808080808080)
    right = ((words + np.uint64(0x4646464646464646)) | (words - zeros)) & high == 0
    right &= words & high == 0
    words = words - zeros
    words = (words * np.uint64(10) + (words >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    words = (words * np.uint64(100) + (words >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    words = (words * np.uint64(10000) + (words >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
    return words.astype(np.float64), right


KEEP = np.array([(1 << (8 * n)) - 1 for n in range(WORD)] + [(1 << 64) - 1], dtype=np.uint64)
SLOT_KEYS = mixed((np.arange(SLOTS, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))


def _hashed(
    block: bytes, starts: np.ndarray, lengths: np.ndarray, words: np.ndarray, hash_size: int | None
) -> np.ndarray:
    """Hash tokens of any length into ids (N, 26) int64, which depend on slot and token alone.

    Begins with ``mixed(slot's key + length)``; each eight bytes, the last ones filled up with zeros, are added by
    exclusive or and mixed again. Then modulo ``hash_size``, or without it the upper 63 bits.
    """
    state = mixed(SLOT_KEYS + lengths.astype(np.uint64))
    state = mixed(state ^ (words & KEEP[np.minimum(lengths, WORD)]))
    long = np.nonzero(lengths > WORD)
    if len(long[0]):
        state[long] = _rest(block, starts[long], lengths[long], state[long])
    ids = state >> np.uint64(1) if hash_size is None else state % np.uint64(hash_size)
    return ids.astype(np.int64)


def _rest(block: bytes, starts: np.ndarray, lengths: np.ndarray, state: np.ndarray) -> np.ndarray:
    """The further rounds of tokens longer than a word; all (K,)."""
    everywhere = np.ndarray(len(block) + 1, dtype="<u8", buffer=block + bytes(WORD), strides=(1,))
    done, open_ = WORD, np.arange(len(starts))
    while len(open_):
        part = everywhere[starts[open_] + done] & KEEP[np.minimum(lengths[open_] - done, WORD)]
        state[open_] = mixed(state[open_] ^ part)
        done += WORD
        open_ = open_[lengths[open_] > done]
    return state
