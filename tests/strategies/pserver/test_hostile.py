"""Bytes that make no sense change nothing: no crash, no memory, exact values for those who train, strangers get
nothing."""

from __future__ import annotations

import random
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq

from tests.pace import wait_for
from tests.runs import start
from tests.strategies.pserver.flooded import DESCRIPTORS
from tests.strategies.pserver.harness import DIM, Bare, Cluster, Sum, config, in_threads, push_all
from trainer.errors import RunFailed
from trainer.strategies.pserver.protocol import messages as wire
from trainer.strategies.pserver.protocol.messages import CODES, HEADER, LINE, Kind, Message, Record, Verb, pack, text
from trainer.strategies.pserver.protocol.sockets import ServerSocket, WorkerSocket, key_pair, password
from trainer.strategies.pserver.server import server as server_module
from trainer.strategies.pserver.server.server import SMALLEST_LIMIT

SHORT, LONG = 2_000, 25_000
"""Fuzzed messages for each mode, in ``make test`` and in ``make test-long``."""
MOST_GROWTH = 300 << 20  # bytes
SABOTEUR = 2


def nonsense(draw: random.Random) -> Any:
    """A JSON value of any shape."""
    simple: list[Any] = [
        None,
        True,
        -1,
        0,
        1,
        2**31,
        -(2**63),
        2**200,
        1e308,
        float("inf"),
        float("nan"),
        "",
        "x",
        "../../x",
        "\x00",
        [],
        {},
    ]
    if draw.random() < 0.7:
        return draw.choice(simple)
    return [draw.choice(simple) for _ in range(3)] if draw.random() < 0.5 else {"a": draw.choice(simple)}


KEYS = {
    Verb.START: ("dtype", "pieces", "tables", "last"),
    Verb.LEASE: ("epoch", "blocks", "done"),
    Verb.FENCE: ("rank", "life", "epoch", "block"),
    Verb.SAVE: ("folder", "mark"),
    Verb.SHRINK: ("age",),
}


def texts(verb: Verb, draw: random.Random) -> list[Record]:
    """A text for that verb: no JSON, JSON of a wrong shape, keys that miss or hold nonsense."""
    if draw.random() < 0.2:
        raw = draw.choice([b"", b"{", b"[" * 5000, b"\xff\xfe", b"nul", b'{"epoch": 1' * 9, b"9" * 5000])
        return [Record(Kind.TEXT, np.frombuffer(raw, dtype=np.uint8))]
    if draw.random() < 0.2:
        return [text(nonsense(draw))]
    keys = [k for k in KEYS.get(verb, ("x",)) if draw.random() < 0.8]
    told = {k: nonsense(draw) for k in keys}
    if verb == Verb.SAVE:
        told.pop("folder", None)  # where to write is the worker's to say; nothing here says a path that exists
        told |= {"folder": draw.choice([None, 5, "/dev/null/x", "\x00", []])}
    if verb == Verb.FENCE and draw.random() < 0.9:
        told["rank"] = draw.choice([-1, -3, 3, 2**40, None, "worker 0", float("nan")])
        told |= {"life": 1, "epoch": 0, "block": 0}
    elif verb == Verb.FENCE:
        told.pop("rank", None)
    if verb == Verb.SHRINK:
        told["age"] = draw.choice([0, -1, None, "x", float("nan"), float("inf"), []])
    if verb == Verb.LEASE:  # a lease that makes sense would be one
        told.pop(draw.choice(["epoch", "blocks", "done"]), None)
    return [text(told)]


def arrays(draw: random.Random) -> Iterator[Record]:
    """Records of wrong dtypes, shapes, counts, kinds, tables and ids."""
    ids = [[-1], [3, 2, 1], [5, 5], [0, 10**15], [2**63 - 1], [], [1, 2, 3], [999, 1000]]
    for _ in range(draw.randrange(4)):
        kind, table = draw.choice(list(Kind)), draw.choice([0, 1, 2, 2**31])
        dtype = draw.choice(list(CODES))
        if kind == Kind.TEXT:
            continue
        if kind == Kind.IDS and draw.random() < 0.8:
            yield Record(kind, np.array(draw.choice(ids), dtype=np.int64), table)
        elif kind == Kind.WORK and draw.random() < 0.5:
            yield Record(kind, np.array([[draw.choice([-(2**63), 2**63 - 1, 0])] * 4], dtype=np.int64), table)
        elif kind == Kind.NUMBERS and draw.random() < 0.8:
            numbers = [draw.choice([0.0, -1.0, np.nan, np.inf, -np.inf, 1e300, 1e18]) for _ in range(draw.randrange(5))]
            yield Record(kind, np.array(numbers), table)
        else:
            shape = draw.choice([(0,), (1,), (3,), (4,), (5,), (2, DIM), (3, DIM), (3, 1), (0, 7), (1000,)])
            yield Record(kind, np.ones(shape, dtype=dtype), table)


def requests(draw: random.Random, number: int, life: int) -> list[Any]:
    """A well-formed message of the saboteur's own key whose content is nonsense."""
    verb = draw.choice([v for v in Verb if v not in (Verb.HELLO, Verb.BYE)] + [Verb.PUSH, Verb.PULL] * 3)
    records = [*texts(verb, draw), *arrays(draw)]
    draw.shuffle(records)
    wild = [0, 1, 2, 10**9, 2**63, 2**64 - 1]
    message = Message(
        verb,
        SABOTEUR,
        life if draw.random() < 0.95 else draw.choice([0, 2**32 - 1]),
        number,
        sequence=draw.choice(wild[3:]) if verb == Verb.PUSH else draw.choice(wild),
        clock=draw.choice([0, 1, 2, 10**9, 2**62, 2**63 - 1, -1, -(2**63)]),
        flags=draw.choice([0, 1, 2, 3, 4, 7, 65535]),
        records=records,
    )
    if verb in (Verb.PUSH, Verb.PULL, Verb.MEET, Verb.COMMIT):
        message.records = [r for r in records if r.kind != Kind.TEXT]
    return pack(message)


def mutated(draw: random.Random, number: int, life: int) -> list[Any]:
    """A valid message with bits turned, frames cut, doubled or left out; half of them with a checksum that fits."""
    frames = [bytearray(memoryview(f).cast("B")) if np.size(f) else bytearray() for f in requests(draw, number, life)]
    for _ in range(draw.randrange(1, 4)):
        place = draw.randrange(len(frames))
        frame = frames[place]
        what = draw.randrange(5)
        if what == 0 and frame:
            frame[draw.randrange(len(frame))] ^= 1 << draw.randrange(8)
        elif what == 1:
            del frame[draw.randrange(len(frame) + 1) :]
        elif what == 2:
            frames.insert(place, bytearray(frame))
        elif what == 3 and len(frames) > 1:
            del frames[place]
        else:
            frame += draw.randbytes(draw.randrange(64))
    if draw.random() < 0.5 and len(frames[0]) >= HEADER.size:
        head = frames[0]
        head[8:12] = struct.pack("<I", life)
        head[4:6] = struct.pack("<H", SABOTEUR)
        crc = zlib.crc32(head[HEADER.size :], zlib.crc32(head[: HEADER.size - 4]))
        head[HEADER.size - 4 : HEADER.size] = struct.pack("<I", crc)
    return frames


def lying(draw: random.Random, number: int, life: int) -> list[Any]:
    """A header that declares other numbers, lengths and shapes than there are, with a checksum that fits."""
    huge = [0, 1, 3, 2**31, 2**62, 2**63, 2**64 - 1]
    lines = b"".join(
        LINE.pack(
            draw.randrange(3),
            draw.randrange(9),
            draw.randrange(8),
            draw.randrange(4),
            draw.choice(huge),
            draw.choice(huge),
            draw.choice([0, 0, 8, 2**64 - 1]),
        )
        for _ in range(draw.randrange(3))
    )
    count = draw.choice([len(lines) // LINE.size] * 3 + [2**32 - 1, 4097])
    verb = draw.choice([*Verb, 0, 200])
    rank = draw.choice([SABOTEUR, SABOTEUR, 0, 65535])
    version = draw.choice([2, 2, 2, 1])
    head = HEADER.pack(0x5054, version, verb, rank, 0, life, number, 2**40, 0, count, 0)[:-4]
    crc = zlib.crc32(lines, zlib.crc32(head))
    first = head + struct.pack("<I", crc) + lines
    return [first, *(b"12345678"[: draw.choice([0, 8])] for _ in range(len(lines) // LINE.size))]


def noise(draw: random.Random, number: int, life: int) -> list[Any]:
    """Random bytes in random frames."""
    return [draw.randbytes(draw.choice([0, 1, HEADER.size, 100])) for _ in range(draw.randrange(1, 5))]


def sabotage(cluster: Cluster, server: int, messages: int, seed: int, trained: Iterable[threading.Event] = ()) -> int:
    """Send so many messages with a key of the run; what was answered to them.

    Args:
        trained: the second half is sent after these.
    """
    draw, context = random.Random(seed), zmq.Context()
    peer = WorkerSocket(context, cluster.secret, SABOTEUR, server, cluster.sockets[server].endpoint)
    peer.socket.sndtimeo, peer.socket.rcvtimeo = 20_000, 20_000
    answered = 0
    try:
        peer.send(pack(Message(Verb.HELLO, SABOTEUR, sequence=77)))
        answer = peer.socket.recv_multipart()
        life = struct.unpack_from("<I", answer[0], 8)[0]
        kinds: list[Callable[..., list[Any]]] = [requests, requests, mutated, lying, noise]
        for number in range(2, messages + 2):
            if number == messages // 2:
                for event in trained:
                    wait_for(event.is_set, 60, "workers train")
            frames = draw.choice(kinds)(draw, number, life)
            peer.socket.send_multipart(
                [f if isinstance(f, (bytes, bytearray)) else np.ascontiguousarray(f) for f in frames]
            )
            while peer.socket.poll(0):
                peer.socket.recv_multipart()
                answered += 1
        beat = Message(Verb.STATS, SABOTEUR, life, 1)
        peer.send(pack(beat))
        while struct.unpack_from("<Q", peer.socket.recv_multipart()[0], 12)[0] != 1:
            answered += 1
    finally:
        peer.close(0)
        context.term()
    return answered


@pytest.mark.parametrize("messages", [SHORT, pytest.param(LONG, marks=pytest.mark.long)])
@pytest.mark.parametrize("mode", ["async", "ssp", "geo", "sync"])
def test_fuzzed_messages_of_a_run_s_own_key_change_nothing(mode: str, messages: int) -> None:
    run = config(mode, 3, 1, timeout_s=100.0, **({"staleness": 10**6} if mode == "ssp" else {}))
    with Cluster(run) as cluster:
        first = Bare(cluster, 0)
        first.begin()
        [server] = cluster.servers
        before = psutil.Process().memory_info().rss
        totals, over, sign = Sum(5, 2, 200), threading.Event(), 1.0 if mode == "geo" else -1.0
        again = [threading.Event() for _ in range(2 * (mode != "sync"))]
        sends = partial(sabotage, cluster, 0, messages, len(mode), again)
        jobs: dict[str, Any] = {"saboteur": partial(_and_then, over.set, sends)}
        if mode != "sync":
            for rank in (0, 1):
                worker = first if rank == 0 else Bare(cluster, 1)
                jobs[f"worker {rank}"] = partial(_train, worker, totals, sign, again[rank], over)
        done = in_threads(jobs, 120)
        rounds = [done.get(f"worker {rank}", 0) for rank in (0, 1)]
        growth = psutil.Process().memory_info().rss - before
        vectors, rows = first.look(Sum.IDS)
        np.testing.assert_array_equal(vectors[0], np.tensordot(rounds, totals.vectors.sum(1), 1))
        each = (totals.picked * totals.values[:, :, None]).sum(1)
        assert list(rows.values()) == np.tensordot(rounds, each, 1).tolist() and list(rows) == Sum.IDS.tolist()
        assert mode == "sync" or min(rounds) > 1
        assert growth < MOST_GROWTH
        assert server.outlet.malformed > messages // 4
        assert done["saboteur"] > messages // 10
        assert server.count["pushes"] == 200 * sum(rounds)
        assert server.members.present() == [0, 1, 2]
        first.die()


def _and_then(after: Callable[[], None], job: Callable[[], Any]) -> Any:
    try:
        return job()
    finally:
        after()


def _train(worker: Bare, totals: Sum, sign: float, again: threading.Event, over: threading.Event) -> int:
    """Push all of it again and again until it is over; returns how often. The second time begins with ``again``."""
    client, rounds, waiting = worker.client, 0, []
    while not over.is_set():
        if rounds:
            again.set()
        for number in range(totals.pushes):
            waiting = [r for r in waiting if r.answer is None]
            waiting += client.push(totals.messages(worker, number, sign))
            client.until(lambda: sum(r.answer is None for r in waiting) < 4)  # noqa: B023
        client.wait(waiting)
        rounds += 1
    if worker.rank:
        worker.die()
    return rounds


def check_training(worker: Bare) -> None:
    """A worker's pushes still count once each."""
    total = Sum(0, 1, 50)
    push_all(worker, total, -1.0)
    vectors, _ = worker.look(Sum.IDS)
    np.testing.assert_array_equal(vectors[0], total.dense)


def greet(peer: Any, heard: Callable[[], bool]) -> None:
    """Say HELLO as worker 1 and get nothing, not even when the server has heard of it."""
    peer.send_multipart(pack(Message(Verb.HELLO, 1, sequence=5)))
    assert not peer.poll(1000)
    wait_for(heard, 60, "the server has turned it away")
    assert not peer.poll(0)
    peer.close()


def stranger(context: zmq.Context[Any], endpoint: str, cluster: Cluster, how: str) -> Any:
    """A peer that has not the key it ought to have."""
    other_run = bytes(32)
    peer = context.socket(zmq.DEALER)
    peer.linger = 0
    if how != "no CURVE":
        own = zmq.curve_keypair() if how == "key of its own" else key_pair(other_run, "worker 0")
        peer.curve_publickey, peer.curve_secretkey = own
        peer.curve_serverkey = key_pair(cluster.secret, "server 0")[0]
    peer.connect(endpoint)
    return peer


@pytest.mark.parametrize("how", ["key of its own", "key of another run", "no CURVE", "plain bytes"])
def test_strangers_get_nothing_while_workers_train(how: str) -> None:
    with Cluster(config("async", 2, 1)) as cluster, zmq.Context() as context:
        worker, [server] = Bare(cluster, 0), cluster.servers
        worker.begin()
        handled = []
        take = server.take
        server.take = lambda address, message: (handled.append(message.rank), take(address, message))[1]  # type: ignore[method-assign]
        if how == "plain bytes":
            host, _, port = server.outlet.endpoint.removeprefix("tcp://").rpartition(":")
            with socket.create_connection((host, int(port))) as raw:
                raw.settimeout(1)
                raw.sendall(random.Random(0).randbytes(1 << 16))
                greeting = b""
                try:
                    while data := raw.recv(4096):
                        greeting += data
                except OSError:
                    pass
            assert len(greeting) <= 64  # ZeroMQ says which protocol it speaks, and no more
        else:
            peer = stranger(context, server.outlet.endpoint, cluster, how)
            greet(peer, lambda: server.outlet.turned_away > 0 or not how.startswith("key"))
        check_training(worker)
        assert set(handled) == {0}
        assert (server.outlet.turned_away > 0) == (how.startswith("key"))
        assert not server.members.all[1].lives
        worker.die()


def test_flood_of_connections_keeps_nobody_from_saving(tmp_path: Path) -> None:
    """Strangers take all descriptors of a server: it saves all the same, and lets workers in again."""
    process = start(str(tmp_path), cwd=tmp_path, module="tests.strategies.pserver.flooded", spares=0)
    screen, flood = tmp_path / "screen.txt", list[socket.socket]()
    try:

        def says(word: str) -> str:
            def line() -> str:
                told = screen.read_text()
                assert process.poll() is None or word in told, f"it ended before it said {word}: {told}"
                return next((line for line in told.splitlines() if word in line), "")

            return str(wait_for(line, 600, f"it says {word}"))

        host, _, port = says("tcp://").rpartition("tcp://")[2].rpartition(":")
        for _ in range(DESCRIPTORS):
            flood.append(stranger := socket.socket())
            stranger.setblocking(False)
            stranger.connect_ex((host, int(port)))  # where nobody is let in, nobody answers
        (tmp_path / "go").touch()
        for word in ("full", "saved", "pushed"):
            says(word)
        assert process.wait(600) == 0
        assert (tmp_path / "persistables.by-0.partial" / "server-0.safetensors").is_file()
        written = tmp_path / "checkpoints" / "step-1.partial" / "server-0.safetensors"
        wait_for(written.is_file, 30, f"{written} is written by the copy of the server")
    finally:
        process.kill()
        for connection in flood:
            connection.close()


@pytest.mark.parametrize("mechanism", [None, "handshake"])
def test_connection_that_says_nothing_is_closed(mechanism: str | None) -> None:
    with Cluster(config("async", 1, handshake_s=0.2)) as cluster:
        host, _, port = cluster.sockets[0].endpoint.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port))) as silent:
            silent.settimeout(600)
            if mechanism:
                silent.sendall(
                    b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03"
                )  # the first bytes of ZMTP 3, and no more
            while silent.recv(4096):
                pass
        Bare(cluster, 0).die()


def test_server_listens_at_its_host_s_address_and_no_other() -> None:
    before = {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    with Cluster(config("async", 1, 1)) as cluster:
        now = {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        assert [f"tcp://{ip}:{port}" for ip, port in now - before] == [cluster.sockets[0].endpoint]
        assert {ip for ip, _ in now - before} == {"127.0.0.1"}
        Bare(cluster, 0).die()


@pytest.mark.parametrize("who", [b"", b"worker 0", b"worker 9", b"server 0"])
def test_strangers_at_a_unix_socket_get_nothing(tmp_path: Path, who: bytes) -> None:
    with Cluster(config("async", 2, 1), str(tmp_path)) as cluster, zmq.Context() as context:
        worker, [server] = Bare(cluster, 0), cluster.servers
        worker.begin()
        assert server.outlet.endpoint == f"ipc://{tmp_path}/server-0"
        peer = context.socket(zmq.DEALER)
        peer.linger = 0
        if who:
            peer.plain_username, peer.plain_password = who, password(bytes(32), "worker 0")
        peer.connect(server.outlet.endpoint)
        greet(peer, lambda: server.outlet.turned_away > 0 or not who)
        check_training(worker)
        assert (server.outlet.turned_away > 0) == bool(who)
        assert not server.members.all[1].lives
        worker.die()


def test_a_worker_cannot_speak_for_another_at_a_unix_socket(tmp_path: Path) -> None:
    with Cluster(config("async", 2, 1), str(tmp_path)) as cluster, zmq.Context() as context:
        [server] = cluster.servers
        peer = WorkerSocket(context, cluster.secret, 0, 0, server.outlet.endpoint)
        peer.send(pack(Message(Verb.HELLO, 1, sequence=5)))
        assert not peer.socket.poll(1000)
        peer.close(0)
        assert server.outlet.malformed == 1 and not server.members.all[1].lives


def test_frame_above_the_limit_costs_its_sender_the_connection_and_nobody_else() -> None:
    with Cluster(config("async", 2, 1)) as cluster, zmq.Context() as context:
        worker, [server] = Bare(cluster, 0), cluster.servers
        worker.begin()
        before = psutil.Process().memory_info().rss
        big = np.zeros(SMALLEST_LIMIT + 1, dtype=np.uint8)
        peer = WorkerSocket(context, cluster.secret, 1, 0, server.outlet.endpoint)
        peer.send(pack(Message(Verb.HELLO, 1, sequence=5, records=[Record(Kind.SCALES, big)])))
        assert not peer.socket.poll(1500)
        peer.close(0)
        check_training(worker)
        assert not server.members.all[1].lives
        assert server.outlet.malformed == 0  # ZeroMQ closes the connection and tells nobody why
        del big
        assert psutil.Process().memory_info().rss - before < MOST_GROWTH
        worker.die()


def test_worker_refuses_its_own_frame_that_no_server_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SMALLEST_LIMIT", 1 << 16)
    run = config("async", 1, 1)
    run["plan"]["model"]["parameters"] = 100
    with Cluster(run) as cluster:
        worker = Bare(cluster, 0)
        worker.begin()
        ids = np.arange((1 << 16) // (8 * DIM) + 1, dtype=np.int64)
        said = r"PUSH of worker 0 to server 0 .* 65,544 bytes of ROWS of table 1 .* 65,536.*data\.batch_size"
        with pytest.raises(RunFailed, match=said):
            worker.client.push(worker.gradient(np.zeros(4), ids, 1.0, -1.0, 1))
        told = [text({"x": "y" * wire.TEXT_LIMIT}), *([Record(Kind.NUMBERS, np.zeros(1))] * wire.MOST_RECORDS)]
        with pytest.raises(RunFailed, match=r"STATS .* 1,048,585 bytes of TEXT .* 1,048,576"):
            worker.client.ask(0, Message(Verb.STATS, records=told[:1]))
        with pytest.raises(RunFailed, match=r"STATS .* 4,097 records.* 4,096"):
            worker.client.ask(0, Message(Verb.STATS, records=told))
        worker.client.sequence = 0
        check_training(worker)
        worker.die()


def test_log_names_the_first_ten_refused_messages_and_then_each_power_of_two(
    capsys: pytest.CaptureFixture[str],
) -> None:
    socket_ = ServerSocket.__new__(ServerSocket)
    socket_.malformed = 0
    for _ in range(100):
        socket_.refuse(ValueError("nonsense"))
    told = [int(line.split()[2].rstrip(":")) for line in capsys.readouterr().out.splitlines()]
    assert told == [*range(1, 11), 16, 32, 64] and socket_.malformed == 100
