"""Large values lie in memory that worker and server share: whole, nobody else's, and gone when the processes are
gone."""

from __future__ import annotations

import fcntl
import os
import random
import struct
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.stranger import said_by_nobody
from tests.strategies.pserver.harness import Bare, Cluster, Sum, config, impatient, in_threads, push_all
from tests.weather import Weather
from trainer.host import segments
from trainer.strategies.pserver.protocol import shared_memory
from trainer.strategies.pserver.protocol.messages import Kind, Malformed, Message, Record, Verb, pack, unpack
from trainer.strategies.pserver.protocol.shared_memory import REFERENCE, TRAILER, Channel, Late, Pool, has_trailer

COUNT = 10_000


class Ends:
    """Two processes that share memory, in one."""

    def __init__(self) -> None:
        self.pools = Pool(), Pool()
        self.here, self.there = Channel(self.pools[0], writable=False), Channel(self.pools[1], writable=True)
        self.pass_on(self.here, self.there)
        self.pass_on(self.there, self.here)

    def pass_on(self, one: Channel, other: Channel, *arrays: np.ndarray) -> list[np.ndarray]:
        """Send a message with these values; returns them as they came."""
        return [r.array for r in self.arrived(other, self.sent(one, *arrays)).records]

    def sent(self, one: Channel, *arrays: np.ndarray) -> list[bytes]:
        """The frames of a message as they go through the socket."""
        message = Message(Verb.PUSH, records=[Record(Kind.DENSE, array) for array in arrays])
        return [bytes(memoryview(f).cast("B")) if len(f) else b"" for f in one.outgoing(pack(message))]

    def arrived(self, other: Channel, frames: list[bytes]) -> Message:
        """The message that came in these frames."""
        views = [memoryview(frame) for frame in frames]
        assert has_trailer(views)
        return unpack(other.incoming(views))


def values(start: int, count: int = COUNT) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.float32)


def test_values_lie_in_memory_and_small_ones_and_ids_in_the_socket() -> None:
    ends = Ends()
    large, small, ids = values(1), values(2, 10), np.arange(COUNT)
    frames = ends.sent(ends.here, large, small, ids)
    assert [len(f) for f in frames[1:4]] == [0, small.nbytes, ids.nbytes]
    for came, went in zip(ends.arrived(ends.there, frames).records, (large, small, ids), strict=True):
        np.testing.assert_array_equal(came.array, went)


def test_memory_is_used_again_only_when_both_ends_have_done_with_it() -> None:
    ends = Ends()
    room = ends.pools[0].room(COUNT, np.dtype(np.float32))
    assert room is not None
    room[:] = values(1)
    [came] = ends.pass_on(ends.here, ends.there, room)
    del room
    ends.pass_on(ends.there, ends.here)  # "still read"
    for start in (2, 3):
        ends.pass_on(ends.here, ends.there, values(start))
        np.testing.assert_array_equal(came, values(1))
    del came
    ends.pass_on(ends.there, ends.here)
    assert all(segment.free for segment in ends.pools[0].segments) and not ends.here.sent
    number = len(ends.pools[0].segments)
    ends.pass_on(ends.here, ends.there, values(4))
    assert len(ends.pools[0].segments) == number


def test_a_message_that_may_be_sent_again_keeps_its_memory() -> None:
    ends = Ends()
    kept = values(1)
    first = ends.sent(ends.here, kept)  # is lost
    for start in range(2, 6):
        ends.pass_on(ends.here, ends.there, values(start))
        ends.pass_on(ends.there, ends.here)
    [record] = ends.arrived(ends.there, first).records
    np.testing.assert_array_equal(record.array, kept)
    [again] = ends.pass_on(ends.here, ends.there, kept)
    np.testing.assert_array_equal(again, kept)


def test_a_late_copy_whose_memory_has_other_values_counts_as_lost() -> None:
    ends = Ends()
    frames = ends.sent(ends.here, values(1))
    ends.arrived(ends.there, frames)
    ends.pass_on(ends.there, ends.here)
    ends.pass_on(ends.here, ends.there, values(2))
    with pytest.raises(Late):
        ends.arrived(ends.there, frames)


def test_readers_cannot_write_what_all_workers_read() -> None:
    ends = Ends()
    [came] = ends.pass_on(ends.there, ends.here, values(1))
    with pytest.raises(ValueError, match="read-only"):
        came[0] = 1
    [came] = ends.pass_on(ends.here, ends.there, values(1))
    came[0] = 7  # an optimizer may work in a gradient


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_another_user_reads_and_writes_nothing() -> None:
    pool = Pool()
    place = Path(f"/proc/{os.getpid()}/fd/{pool.first.fd}")
    assert said_by_nobody(place.read_bytes).startswith("PermissionError")
    assert said_by_nobody(lambda: place.write_bytes(b"x")).startswith("PermissionError")
    assert os.fstat(pool.first.fd).st_mode & 0o777 == 0o600
    assert place.read_bytes()[:8] == pool.mark


def test_memory_cannot_become_shorter_under_a_reader() -> None:
    pool = Pool()
    with pytest.raises(PermissionError):
        os.ftruncate(pool.first.fd, 0)
    with pytest.raises(PermissionError):
        fcntl.fcntl(pool.first.fd, fcntl.F_ADD_SEALS, 0)


def test_frames_that_grow_or_are_all_in_use_take_no_more_memory_than_they_need(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ends = Ends()
    for count in range(COUNT, 20 * COUNT, COUNT // 2):
        [came] = ends.pass_on(ends.here, ends.there, values(0, count))
        np.testing.assert_array_equal(came, values(0, count))
        del came
        ends.pass_on(ends.there, ends.here)
    assert sum(segment.size for segment in ends.pools[0].segments) < 3 * 4 * 20 * COUNT
    ends.pools[0].most = 3
    kept = [ends.pass_on(ends.here, ends.there, values(start))[0] for start in range(6)]
    for start, came in enumerate(kept):
        np.testing.assert_array_equal(came, values(start))
    assert len(ends.pools[0].segments) == 3
    assert "all 3 segments of shared memory are in use" in capsys.readouterr().out


def hostile(ends: Ends, tmp_path: Path) -> dict[str, list[bytes]]:
    """Messages whose trailers lie."""
    frames = ends.sent(ends.here, values(1))
    trailer = frames[-1]
    segment = ends.pools[0].segments[0]
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 1 << 20)

    def told(*reference: int) -> list[bytes]:
        return [*frames[:-1], trailer[: TRAILER.size] + REFERENCE.pack(*reference)]

    right = (1, segment.fd, segment.inode, segment.used, values(1).nbytes)
    return {
        "cut": [*frames[:-1], trailer[:-1]],
        "no reference": [*frames[:-1], trailer[: TRAILER.size]],
        "short": [*frames[:-1], trailer[:20]],
        "the header": told(0, *right[1:]),
        "the trailer": told(2, *right[1:]),
        "far": told(7, *right[1:]),
        "a pipe": told(1, pipe, os.fstat(pipe).st_ino, 1, 10),
        "a file": told(1, file, os.fstat(file).st_ino, 1, 10),
        "another file": told(1, segment.fd, segment.inode + 1, 1, 10),
        "closed": told(1, 999, 5, 1, 10),
        "used otherwise": told(*right[:3], segment.used + 1, right[4]),
        "longer": told(*right[:4], segment.size),
        "huge": told(*right[:4], (1 << 64) - 1),
    }


def test_trailers_that_lie_are_refused_or_count_as_lost(tmp_path: Path) -> None:
    for name, frames in hostile(Ends(), tmp_path).items():
        ends = Ends()
        ends.there._meet(*TRAILER.unpack_from(frames[-1].ljust(TRAILER.size, b"\0"))[:4])
        with pytest.raises((Malformed, Late)):
            ends.arrived(ends.there, frames)
            pytest.fail(name)
        ends.pass_on(ends.here, ends.there)
        [came] = ends.pass_on(ends.here, ends.there, values(3))
        np.testing.assert_array_equal(came, values(3))


def test_without_such_memory_values_go_through_the_socket_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = Ends()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for start in (1, 2):
        frames = ends.sent(ends.here, values(start))
        assert len(frames[1]) == values(1).nbytes
        [record] = ends.arrived(ends.there, frames).records
        np.testing.assert_array_equal(record.array, values(start))
    assert (
        capsys.readouterr().out.count(
            "large values go through the socket: no more shared memory (No space left on device)"
        )
        == 1
    )
    assert shared_memory.opened_pool(1) is None
    assert segments.what_lacks() == "No space left on device"


def test_memory_of_another_process_that_cannot_be_read_is_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    pools = Pool(), Pool()
    here, there = Channel(pools[0], writable=False), Channel(pools[1], writable=True)
    frames = [bytes(f) for f in here.outgoing(pack(Message(Verb.HELLO)))]
    told = list(TRAILER.unpack(frames[-1]))
    told[1] = 1  # of another program, which has no such descriptor
    there.incoming([memoryview(f) for f in (frames[0], TRAILER.pack(*told))])
    answer = there.outgoing(pack(Message(Verb.DONE)))
    here.incoming([memoryview(f) for f in answer])
    assert not here.is_read and there.pool.segments == []
    assert "cannot be read" in capsys.readouterr().out
    assert len(here.outgoing(pack(Message(Verb.PUSH, records=[Record(Kind.DENSE, values(1))])))[1]) == COUNT


PUSHES = 12
STALENESS = 2


def check(cluster: Cluster, total: Sum, mean: bool = False) -> None:
    """Every server's parameters are exactly the sum (or its mean over the workers), each push was applied once, and all
    watermarks are at the end."""
    share = 1 / cluster.workers if mean else 1.0
    reader = Bare(cluster, 0)
    try:
        vectors, rows = reader.look(Sum.IDS)
    finally:
        reader.die()
    for vector in vectors:
        np.testing.assert_array_equal(vector, total.dense * share)
    assert rows == {i: value * share for i, value in total.rows.items()}
    for server in cluster.servers:
        assert server.count["pushes"] == cluster.workers * total.pushes
        assert [m.watermark.done for m in server.members.all] == [total.pushes] * cluster.workers
        assert not any(m.watermark.above for m in server.members.all)


def one_worker(cluster: Cluster, rank: int, total: Sum, mode: str, deaths: list[int], ready: threading.Event) -> None:
    """All pushes of a rank, over several lives."""
    if rank:
        assert ready.wait(30)
    for number, stop in enumerate([*deaths, None]):
        worker = Bare(cluster, rank)
        if rank == 0 and not number:
            worker.begin()
            ready.set()
        try:
            push_all(worker, total, 1.0 if mode == "geo" else -1.0, stop, in_step=mode in ("ssp", "sync"))
        finally:
            worker.die()


def sum_of_all(cluster: Cluster, mode: str, seed: int) -> None:
    generator = random.Random(seed)
    total, ready = Sum(seed, cluster.workers, PUSHES), threading.Event()
    jobs = {}
    for rank in range(cluster.workers):
        ends = sorted(generator.sample(range(1, PUSHES), generator.randrange(3)))
        jobs[f"worker {rank}"] = partial(one_worker, cluster, rank, total, mode, ends, ready)
    in_threads(jobs)
    check(cluster, total, mode == "sync")


@pytest.mark.parametrize("mode", ["async", "ssp", "geo", "sync"])
def test_sum_is_exact_through_memory_in_bad_weather_and_with_restarted_workers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str
) -> None:
    monkeypatch.setattr(shared_memory, "LEAST", 1)
    own = {"sync": {}, "ssp": {"launch_barrier": False, "staleness": STALENESS}}.get(mode, {"launch_barrier": False})
    came = 0
    for seed in range(3):
        weather = Weather(seed, drop=0.1, double=0.15, delay=0.2)
        folder = tmp_path / f"{seed}"
        folder.mkdir(mode=0o700)
        workers, servers = 2 if mode == "sync" else 2 + seed % 2, 1 + seed % 3
        with impatient(monkeypatch, weather), Cluster(config(mode, workers, servers, **own), str(folder)) as cluster:
            sum_of_all(cluster, mode, seed)
            for socket in cluster.sockets:
                assert socket.sharing is not None
                came += sum(channel.newest for channel in socket.sharing.channels.values())
    assert came > 200


def test_nothing_is_left_of_processes_that_are_killed() -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        pool = Pool()
        room = pool.room(COUNT, np.dtype(np.float32))
        place = os.fstat(pool.first.fd)
        told = struct.pack("<QQQ", place.st_dev, pool.first.fd, pool.first.inode)
        os.write(writing, told if room is not None else b"")
        os.kill(os.getpid(), 9)
    assert os.waitpid(child, 0)[1] == 9
    device, *where = struct.unpack("<QQQ", os.read(reading, 24))
    shared = [(os.stat("/dev/shm").st_dev, file.inode()) for file in os.scandir("/dev/shm")]  # of others, too
    assert (device, where[1]) not in shared
    with pytest.raises(FileNotFoundError):
        segments.attach(child, *where, writable=True)
