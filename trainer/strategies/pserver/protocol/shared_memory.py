"""Large values between processes of one host: they lie in memory that both ends map, and the message says where.

A process writes to segments of its own alone, and others read them. A segment has no name (memfd), so nothing of it is
left when its processes have ended, however that came; only this user's processes can open it. A segment is used again
when nobody here refers to it any more, and whoever was told of it has said that he has done with it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from trainer.host import segments
from trainer.strategies.pserver.protocol.messages import HEADER, Malformed

LEAST = 1 << 14
"""Bytes. A smaller frame costs less in the socket."""
BEGIN = 64
"""Bytes of a segment before its values: its mark, then how often it was used."""
STEP = 1 << 16
"""Segments are whole multiples of it, so that frames of about the same length use the same."""
MOST = 64
"""Segments of one process for each other one, at most, and how many of that one's stay mapped."""
MOST_IN_ALL = 256
MARK = struct.Struct("<8sQ")
TRAILER = struct.Struct("<8sIIQQQBHH")
"""Own mark; process, descriptor and inode of its first segment; number of this message, if it refers to any segment;
greatest number that came; whether the other end's memory can be read; how many numbers of messages that are still read
follow, how many references."""
NUMBER = struct.Struct("<Q")
REFERENCE = struct.Struct("<IIQQQ")
"""Frame, descriptor, inode, how often the segment was used, length in bytes."""


class Late(Exception):
    """The memory of a message has other values now: a copy that came after its answer. It counts as lost."""


class Segment:
    """A piece of memory that this process writes to.

    Args:
        size: in bytes. mark: of this process.

    Raises:
        OSError: there is no such memory.

    Attributes:
        lent: messages that refer to it, and whose receivers have not done with it.
    """

    def __init__(self, size: int, mark: bytes) -> None:
        self.size, self.mark, self.lent, self.used = size, mark, 0, 0
        self.fd, self.map = segments.make(size)
        self.inode = os.fstat(self.fd).st_ino
        self.address = np.frombuffer(self.map, np.uint8, 1, BEGIN).ctypes.data
        self._of: weakref.ref[np.ndarray] | None = None
        MARK.pack_into(self.map, 0, mark, 0)

    @property
    def free(self) -> bool:
        """Whether nobody refers to what it holds."""
        return not self.lent and (self._of is None or self._of() is None)

    def has(self, array: np.ndarray) -> bool:
        """Whether it holds a copy of that array."""
        return self._of is not None and self._of() is array

    def take(self, count: int, dtype: np.dtype[Any], copied: np.ndarray | None = None) -> np.ndarray:
        """Use it for an array (count,), whatever was there before.

        Args:
            copied: what the array is a copy of; while that is there, it may be sent again.
        """
        self.used += 1
        MARK.pack_into(self.map, 0, self.mark, self.used)
        array = np.frombuffer(self.map, dtype, count, BEGIN)
        if copied is not None:
            np.copyto(array, copied.reshape(-1))
        self._of = weakref.ref(array if copied is None else copied)
        return array

    def close(self) -> None:
        """Give the memory back to the system, once the receivers have done so, too."""
        with suppress(BufferError):
            self.map.close()
        os.close(self.fd)


class Pool:
    """The segments of this process.

    Args:
        others: how many processes read them.

    Raises:
        OSError: this system has no such memory.
    """

    def __init__(self, others: int = 1) -> None:
        self.most = min(MOST * others, MOST_IN_ALL)
        self.mark = secrets.token_bytes(8)
        self.first = Segment(mmap.PAGESIZE, self.mark)
        self.segments: list[Segment] = []
        self.by_address: dict[int, Segment] = {}
        self.number = 0
        self.reported = ""
        self.find_gone: Callable[[], None] = lambda: None
        """Called when no segment is free."""

    def room(self, count: int, dtype: np.dtype[Any]) -> np.ndarray | None:
        """Memory for an array (count,); None: there is none."""
        segment = self._free(count * dtype.itemsize)
        return None if segment is None else segment.take(count, dtype)

    def _free(self, length: int) -> Segment | None:
        needed = BEGIN + length
        for segment in self.segments:
            if needed <= segment.size <= 2 * needed + STEP and segment.free:
                return segment
        return self._new(needed)

    def _new(self, needed: int) -> Segment | None:
        full = len(self.segments) >= self.most
        if full:
            self.find_gone()
        unfit = next((s for s in self.segments if s.free and (full or needed / 2 < s.size < needed)), None)
        if unfit is not None:  # frames that grow slowly would leave one segment after the other
            self.segments.remove(unfit)
            del self.by_address[unfit.address]
            unfit.close()
        if len(self.segments) >= self.most:
            self.tell(f"all {self.most} segments of shared memory are in use")
            return None
        try:
            made = Segment((needed + needed // 8 + STEP - 1) // STEP * STEP, self.mark)
        except OSError as error:
            self.tell(f"no more shared memory ({error.strerror or error})")
            return None
        self.segments.append(made)
        self.by_address[made.address] = made
        return made

    def tell(self, why: str) -> None:
        """Say in the log, once, why values go through the socket."""
        if not self.reported:
            self.reported = why
            print(f"large values go through the socket: {why}", flush=True)

    def holding(self, frame: np.ndarray) -> Segment | None:
        """The segment in which a frame's values lie; they are copied into one where they lie elsewhere. None: there is
        none."""
        segment = self.by_address.get(frame.ctypes.data)
        segment = segment or next((s for s in self.segments if s.has(frame)), None)
        if segment is None and (segment := self._free(frame.nbytes)) is not None:
            segment.take(frame.size, frame.dtype, frame)
        return segment

    def close(self) -> None:
        """Give all segments back."""
        for segment in (self.first, *self.segments):
            segment.close()
        self.segments.clear()
        self.by_address.clear()


class Channel:
    """Both directions between this process and another one: large frames in memory instead of in the socket.

    Args:
        pool: of this process.
        writable: arrays that come may be written to, as optimizers do with gradients.

    Attributes:
        is_read: the other end has said that it can read the memory of this process.
    """

    def __init__(self, pool: Pool, writable: bool) -> None:
        self.pool, self.writable = pool, writable
        self.is_read = self.reads = False
        self.mark, self.process = b"", 0
        self.sent: dict[int, list[Segment]] = {}
        self.newest = 0
        self.maps: dict[int, mmap.mmap] = {}
        self.refers: dict[int, tuple[weakref.ref[np.ndarray], int]] = {}
        self._serial = 0

    # --- what goes -------------------------------------------------------------------------------------------------

    def outgoing(self, frames: Sequence[Any]) -> list[Any]:
        """The frames of a message as they go through the socket: large ones are empty, and a last one says where they
        lie."""
        going, references, segments = list(frames), [], []
        for place, frame in enumerate(frames):
            if not self.is_read or place == 0 or frame.nbytes < LEAST or frame.dtype == np.int64:
                continue  # ids are checked before they are used, so nobody may change them afterwards
            segment = self.pool.holding(frame)
            if segment is not None:
                segment.lent += 1
                segments.append(segment)
                references.append(REFERENCE.pack(place, segment.fd, segment.inode, segment.used, frame.nbytes))
                going[place] = b""
        if segments:
            self.pool.number += 1
            self.sent[self.pool.number] = segments
        first, held = self.pool.first, {number for _, number in self.refers.values()}
        number = self.pool.number if segments else 0
        head = TRAILER.pack(
            self.pool.mark,
            os.getpid(),
            first.fd,
            first.inode,
            number,
            self.newest,
            self.reads,
            len(held),
            len(references),
        )
        return [*going, b"".join((head, *map(NUMBER.pack, held), *references))]

    def _done(self, newest: int, held: set[int]) -> None:
        """Note the greatest number that came at the other end, and which messages are still read there."""
        for number in [n for n in self.sent if n <= newest and n not in held]:
            self._take_back(number)

    def _take_back(self, number: int) -> None:
        for segment in self.sent.pop(number):
            segment.lent -= 1

    @property
    def is_over(self) -> bool:
        """Whether the other end's process has ended."""
        return bool(self.process) and not os.path.exists(f"/proc/{self.process}")

    def end(self) -> None:
        """Note that the other end has gone: segments that it was told of are free."""
        for number in [*self.sent]:
            self._take_back(number)

    # --- what comes ------------------------------------------------------------------------------------------------

    def incoming(self, frames: Sequence[Any]) -> list[Any]:
        """The frames of a message as they were before ``outgoing``; arrays where they lie in memory.

        Raises:
            Late: they have other values now, or cannot be read.
            Malformed: the last frame makes no sense.
        """
        *plain, trailer = frames
        try:
            mark, process, fd, inode, number, newest, is_read, count, references = TRAILER.unpack_from(trailer)
            after = TRAILER.size + count * NUMBER.size
            held = {n for (n,) in NUMBER.iter_unpack(trailer[TRAILER.size : after])}
            places = [*REFERENCE.iter_unpack(trailer[after:])]
        except struct.error as error:
            raise Malformed(f"places of values: {error}") from error
        if len(places) != references:
            raise Malformed(f"{len(places)} places of values instead of {references}")
        if mark != self.mark:
            self._meet(mark, process, fd, inode)
        self.is_read = bool(is_read)
        self._done(newest, held)
        self.newest = max(self.newest, number)
        for place, *where in places:
            if not 0 < place < len(plain):
                raise Malformed(f"a place of the values of frame {place}")
            plain[place] = self._array(number, *where)
        return plain

    def _meet(self, mark: bytes, process: int, fd: int, inode: int) -> None:
        """Note that another process is at the other end."""
        self.end()
        self.mark, self.process, self.newest, self.maps, self.refers = mark, process, 0, {}, {}
        try:
            found = self._map(fd, inode)
            self.reads = MARK.unpack_from(found)[0] == mark
            if not self.reads:
                self.pool.tell(f"process {process} is another one here")
        except OSError as error:
            self._cannot_read(error)

    def _cannot_read(self, why: OSError) -> None:
        """From now on the other end sends everything through the socket."""
        self.reads = False
        if not self.is_over:
            self.pool.tell(f"the memory of process {self.process} cannot be read ({why})")

    def _map(self, fd: int, inode: int) -> mmap.mmap:
        """A segment of the other end.

        Raises:
            OSError: it is not there.
        """
        if inode in self.maps:
            return self.maps[inode]
        found = segments.attach(self.process, fd, inode, self.writable)
        while len(self.maps) >= MOST:
            del self.maps[next(iter(self.maps))]
        self.maps[inode] = found
        return found

    def _array(self, number: int, fd: int, inode: int, used: int, length: int) -> np.ndarray:
        try:
            found = self._map(fd, inode)
        except FileNotFoundError as error:
            raise Late from error
        except OSError as error:
            self._cannot_read(error)
            raise Late from error
        if length > len(found) - BEGIN:
            raise Malformed(f"{length} bytes in a segment of {len(found)}")
        if MARK.unpack_from(found) != (self.mark, used):
            raise Late
        array = np.frombuffer(found, np.uint8, length, BEGIN)
        self._serial += 1
        self.refers[self._serial] = weakref.ref(array, partial(self.refers.pop, self._serial)), number
        return array


def has_trailer(frames: Sequence[Any]) -> bool:
    """Whether the last of a message's frames says where others lie."""
    first = frames[0]
    return len(first) >= HEADER.size and len(frames) == HEADER.unpack_from(first)[9] + 2


def mark_of(frames: Sequence[Any]) -> bytes:
    """The mark that tells whose shared memory a message may refer to: its sender's, in the message's trailer."""
    return bytes(frames[-1][:8])


def opened_pool(others: int) -> Pool | None:
    """The memory that this process shares with so many others; None: this system has none, and the log says why."""
    try:
        return Pool(others)
    except OSError as error:
        print(f"large values go through the socket: {error}", flush=True)
        return None


def vector(pool: Pool | None, count: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised vector (count,) of values that will be sent, in shared memory if there is room."""
    kind = torch.empty(0, dtype=dtype).numpy().dtype
    room = pool.room(count, kind) if pool is not None and count * kind.itemsize >= LEAST else None
    return torch.empty(count, dtype=dtype) if room is None else torch.from_numpy(room)
