"""A relay between workers and servers, in a process of its own: whole messages are dropped, doubled and held back,
connections reset.

At a Unix socket ZeroMQ's frames can be read (ZMTP 3, RFC 37, with PLAIN), so the relay knows where a message ends. A
stream keeps its order, as a kernel's does: what is held back holds back what follows. Over TCP each frame is in CURVE's
box: whether another one belongs to the same message is told inside, and a box that comes twice ends the connection.
There the relay passes bytes on and resets connections, and the worker's own socket does the rest
(``tests/faults/stormy.py``).

Workers ask at a door where to connect instead: a line of JSON, (rank, endpoint), is answered with another endpoint.
Imports what Python brings alone, and so starts in a moment.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.weather import Weather

DOOR = "door"
GREETING = 64
"""Bytes with which each end of a connection begins."""
MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a frame."""
RATES = {"drop": 0.03, "double": 0.05, "delay": 0.1}


class Storm(Weather):
    """A worker's bad weather, which also resets a connection now and then: after a number of messages, however fast
    they come."""

    def __init__(self, seed: str) -> None:
        super().__init__(seed, **RATES)
        self.counts |= {"reset": 0}
        self.calm = self._until_the_next_reset()

    def _until_the_next_reset(self) -> int:
        return self.random.randint(10, 60)

    def resets(self) -> bool:
        """Whether the connection is reset with this message."""
        self.calm -= 1
        if self.calm > 0:
            return False
        self.calm = self._until_the_next_reset()
        self.counts["reset"] += 1
        return True


class Relay:
    """The relay of one run.

    Args:
        folder: of this user alone, for its sockets. seed: of the weather.
    """

    def __init__(self, folder: Path, seed: str) -> None:
        self.folder, self.seed = folder, seed
        self.storms: dict[int, Storm] = {}
        self.elsewhere: dict[tuple[int, str], str] = {}
        self.told: Counter[str] = Counter()
        self.listening: list[asyncio.Server] = []
        self.numbers = itertools.count()

    @property
    def counts(self) -> Counter[str]:
        """What has happened to all messages, by workers' own sockets too."""
        return sum((Counter(storm.counts) for storm in self.storms.values()), self.told)

    async def at_the_door(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A worker asks where to connect, or tells what its own socket has done."""
        rank, what = json.loads(await reader.readline())
        if isinstance(what, str):
            if (rank, what) not in self.elsewhere:
                self.elsewhere[rank, what] = await self._listen(rank, what)
            writer.write(self.elsewhere[rank, what].encode())
        else:
            self.told.update(what)
        writer.close()

    async def _listen(self, rank: int, target: str) -> str:
        storm = self.storms.setdefault(rank, Storm(f"{self.seed} {rank}"))

        async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._join(storm, target, reader, writer)

        if target.startswith("ipc:"):
            path = self.folder / str(next(self.numbers))  # two workers may ask at once
            self.listening.append(await asyncio.start_unix_server(join, path))
            return f"ipc://{path}"
        self.listening.append(await asyncio.start_server(join, "127.0.0.1", 0))
        return "tcp://127.0.0.1:{1}".format(*self.listening[-1].sockets[0].getsockname())

    async def _join(
        self, storm: Storm, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        kind, _, place = target.partition("://")
        ends = [writer]
        try:
            if kind == "ipc":
                far_reader, far_writer = await asyncio.open_unix_connection(place)
            else:
                host, _, port = place.rpartition(":")
                far_reader, far_writer = await asyncio.open_connection(host, int(port))
            ends.append(far_writer)
            pump = self._messages if kind == "ipc" else self._bytes
            ways = [asyncio.create_task(pump(storm, *way)) for way in ((reader, far_writer), (far_reader, writer))]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            pass  # the server is not there any more
        finally:
            for end in ends:
                end.transport.abort()

    async def _messages(self, storm: Storm, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass messages on, some of them twice, late, or not at all."""
        left = GREETING
        while left and (data := await reader.read(left)):
            writer.write(data)
            left -= len(data)
        message = b""
        while True:
            head = await reader.readexactly(1)
            size = await reader.readexactly(8 if head[0] & LONG else 1)
            message += head + size + await reader.readexactly(int.from_bytes(size, "big"))
            if head[0] & COMMAND:  # of the handshake
                writer.write(message)
            elif head[0] & MORE:
                continue
            elif storm.resets():
                writer.write(message[: len(message) // 2])
                return
            else:
                for late in storm.copies():
                    await asyncio.sleep(late)
                    writer.write(message)
            await writer.drain()
            message = b""

    async def _bytes(self, storm: Storm, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass bytes on."""
        while data := await reader.read(1 << 20):
            if storm.resets():
                return
            writer.write(data)
            await writer.drain()


async def main(folder: Path, seed: str) -> None:
    """Relay until nobody holds the other end of the standard input any more."""
    relay = Relay(folder, seed)
    relay.listening.append(await asyncio.start_unix_server(relay.at_the_door, folder / DOOR))
    print("open", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    print(json.dumps(relay.counts), flush=True)


def at_the_door(door: str, rank: int, what: str | dict[str, int]) -> str:
    """Ask where to connect instead of an endpoint, or tell what a worker's own socket has done."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(door)
        asking.sendall(f"{json.dumps([rank, what])}\n".encode())
        with asking.makefile() as answer:
            return answer.read()


@contextmanager
def relaying(seed: int) -> Iterator[tuple[str, Callable[[], Counter[str]]]]:
    """A relay while the block lasts: its door, and what ends it and tells what has happened to messages."""
    with tempfile.TemporaryDirectory(prefix="relay-") as folder:
        command = [sys.executable, "-S", "-m", "tests.faults.relay", folder, str(seed)]
        root = Path(__file__).resolve().parents[2]
        with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "open\n"

            def counts() -> Counter[str]:
                return Counter(json.loads(process.communicate()[0]))

            try:
                yield f"{folder}/{DOOR}", counts
            finally:
                process.kill()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
