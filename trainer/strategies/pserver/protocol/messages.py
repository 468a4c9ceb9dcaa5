"""What travels between workers and servers: a small fixed header, one line for each buffer, and the raw buffers.

A message is several ZeroMQ frames. The first holds the header and, for each record, a line of 32 bytes that says what
the record's buffer is; the others are the buffers themselves, in the sender's memory (no copy, no pickle). All numbers
are little-endian. ``docs/protocol.md`` is this page for readers.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from trainer.host import json_text

MAGIC = 0x5054
VERSION = 2
HEADER = struct.Struct("<HBBHHIQQqII")
"""magic, version, verb, rank, flags, incarnation, number, sequence, clock, records, crc32 of all before it and the
lines."""
LINE = struct.Struct("<IBBHQQQ")
"""table, kind, dtype, dimensions, rows, columns, length in bytes."""
MOST_RECORDS = 4096
TEXT_LIMIT = 1 << 20
WANTS_DENSE, CREATES, HOLDS = 1, 2, 4
"""Flags of a pull."""
RESTS, WAKES, RESUMES = 1, 2, 4
"""Flags of a push."""
COMES = 1
"""Flag of HELLO: an earlier life of the worker has died, and the first of the other workers will admit this one."""
STOPS, SAVES = 1, 2
"""Flags of MEET: all workers stand still; the first one has the servers save before it comes."""
MARGIN_S = 5.0
"""A server answers within its limit, if only to name who is missing; after this much more time it counts as gone."""
SAVE_S = 3600.0
"""Longest time in which the servers save and the first worker fetches their parts. The others wait for it."""
SAVE_TURN_S = 3000.0
"""Longest time that a SAVE waits for its turn at a server: it is answered before its worker gives it up."""
APART = 1
"""Flag of the answer to SAVE."""
ENDPOINT = "endpoint/server/{}"
"""Note of a server: where it listens."""
SAVING = "saving/server/{}"
"""Note of a server: it writes its part of a checkpoint and answers nobody meanwhile; empty: it has finished."""


class Verb(IntEnum):
    """What a message asks for, or the kind of answer that it is. 10 is not in use."""

    HELLO = 1
    START = 2
    PULL = 3
    PUSH = 4
    MEET = 5
    COMMIT = 6
    LEASE = 7
    FENCE = 8
    FETCH = 9
    SAVE = 11
    STATS = 12
    BEAT = 13
    SHRINK = 14
    BYE = 15
    RATE = 16
    ADMIT = 17
    DONE = 64
    FAILED = 65


class Kind(IntEnum):
    """What a record's buffer means."""

    DENSE = 1
    IDS = 2
    ROWS = 3
    SCALES = 4
    TEXT = 5
    NUMBERS = 6
    WORK = 7


DTYPES: tuple[np.dtype[Any], ...] = tuple(np.dtype(t) for t in ("f4", "f8", "i8", "u1", "u2", "i1"))
"""By their code on the wire; ``u2`` carries bfloat16."""
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
LARGEST_DIMENSIONS = 2


class Malformed(Exception):
    """A message does not follow the protocol; what is wrong with it. It is counted and dropped, its sender gets
    nothing."""


@dataclass(slots=True)
class Record:
    """One buffer: of which table, of which kind, and the array (1-D or 2-D, contiguous)."""

    kind: Kind
    array: np.ndarray
    table: int = 0


@dataclass(slots=True)
class Message:
    """A request or an answer: verb, numbers of the header, records.

    Attributes:
        verb: what it asks for.
        rank, incarnation: the worker, and how many times it was started before.
        number: of the request; its answer carries the same.
        sequence: of a push, counted over all incarnations of its worker; else 0.
        clock: in a pull, the update that must be done before; in an answer, the number of updates done.
        flags: of the verb.
    """

    verb: Verb
    rank: int = 0
    incarnation: int = 0
    number: int = 0
    sequence: int = 0
    clock: int = 0
    flags: int = 0
    records: list[Record] = field(default_factory=list)

    def first(self, kind: Kind, table: int = 0) -> np.ndarray | None:
        """The array of this message's first record of that kind and table, or None."""
        for record in self.records:
            if record.kind == kind and record.table == table:
                return record.array
        return None

    def need(self, kind: Kind, table: int = 0) -> np.ndarray:
        """The array of this message's first record of that kind and table, which must be there.

        Raises:
            Malformed: there is none.
        """
        found = self.first(kind, table)
        if found is None:
            raise Malformed(f"{self.verb.name} without {kind.name}")
        return found

    def text(self) -> Any:
        """The JSON value of this message's text record; an empty dict without one.

        Raises:
            Malformed: it is no JSON.
        """
        array = self.first(Kind.TEXT)
        if array is None:
            return {}
        try:
            return json_text.loads(array.tobytes())
        except ValueError as error:
            raise Malformed(f"{self.verb.name}: {error}") from error

    def mapping(self) -> dict[str, Any]:
        """The JSON value of this message's text record, which must be a dict.

        Raises:
            Malformed: it is something else.
        """
        value = self.text()
        if not isinstance(value, dict):
            raise Malformed(f"{self.verb.name} with a text that is no mapping")
        return value


def text(value: Any) -> Record:
    """Make the record of a message that holds a JSON value."""
    return Record(Kind.TEXT, np.frombuffer(json.dumps(value).encode(), dtype=np.uint8))


def pack(message: Message) -> list[Any]:
    """Pack a message between worker and server into frames; the buffers are the arrays' own memory and must not change
    until they are sent."""
    lines = b"".join(
        LINE.pack(
            r.table,
            r.kind,
            CODES[r.array.dtype],
            r.array.ndim,
            r.array.shape[0],
            r.array.shape[1] if r.array.ndim == LARGEST_DIMENSIONS else 1,
            r.array.nbytes,
        )
        for r in message.records
    )
    m = message
    head = HEADER.pack(
        MAGIC, VERSION, m.verb, m.rank, m.flags, m.incarnation, m.number, m.sequence, m.clock, len(m.records), 0
    )
    crc = zlib.crc32(lines, zlib.crc32(head[:-4]))
    return [head[:-4] + struct.pack("<I", crc) + lines, *(r.array for r in message.records)]


def unpack(frames: Sequence[Any]) -> Message:
    """Unpack a message between worker and server from its frames (anything with the buffer interface); its arrays are
    read-only views.

    Raises:
        Malformed: it is not a message of this version, or says other lengths than it has.
    """
    if not frames:
        raise Malformed("no frames")
    first = memoryview(frames[0]).cast("B")
    if len(first) < HEADER.size:
        raise Malformed(f"a header of {len(first)} bytes")
    magic, version, verb, rank, flags, incarnation, number, sequence, clock, count, crc = HEADER.unpack_from(first)
    if magic != MAGIC or version != VERSION:
        raise Malformed(f"magic {magic:#x}, version {version}")
    if count > MOST_RECORDS or len(first) != HEADER.size + count * LINE.size or len(frames) != count + 1:
        raise Malformed(f"{count} records in {len(frames)} frames")
    if crc != zlib.crc32(first[HEADER.size :], zlib.crc32(first[: HEADER.size - 4])):
        raise Malformed("checksum of the header")
    try:
        message = Message(Verb(verb), rank, incarnation, number, sequence, clock, flags)
        for line, frame in zip(LINE.iter_unpack(first[HEADER.size :]), frames[1:], strict=True):
            message.records.append(_record(line, memoryview(frame).cast("B")))
    except (ValueError, OverflowError) as error:
        raise Malformed(str(error)) from error
    return message


def _record(line: tuple[int, ...], buffer: memoryview) -> Record:
    table, kind, code, dimensions, rows, columns, length = line
    if code >= len(DTYPES) or dimensions not in (1, LARGEST_DIMENSIONS):
        raise Malformed(f"dtype {code}, {dimensions} dimensions")
    dtype = DTYPES[code]
    if length != len(buffer) or rows * columns * dtype.itemsize != length or (dimensions == 1 and columns != 1):
        raise Malformed(f"{rows} x {columns} of {dtype} in {len(buffer)} bytes")
    array = np.frombuffer(buffer, dtype=dtype)
    if kind == Kind.TEXT and length > TEXT_LIMIT:
        raise Malformed(f"a text of {length} bytes")
    return Record(Kind(kind), array.reshape(rows, columns) if dimensions == LARGEST_DIMENSIONS else array, table)


def within(seconds: float, timeout_s: float) -> str:
    """How long was waited, in an error text; the key is named where it is the limit, or a part of it.

    Args:
        timeout_s: strategy.timeout_s.
    """
    keys = {
        timeout_s: " (strategy.timeout_s)",
        timeout_s + MARGIN_S: f" (strategy.timeout_s and {MARGIN_S:g} s for the answer)",
        timeout_s + SAVE_S: " (strategy.timeout_s and an hour for a checkpoint)",
        timeout_s + MARGIN_S + SAVE_S: " (strategy.timeout_s and an hour for a checkpoint)",
    }
    return f"within {seconds:g} s{keys.get(seconds, '')}"
