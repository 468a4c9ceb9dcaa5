"""Two network namespaces with a link of a chosen rate and latency, for benchmarks (root's privileges are needed).

``tc`` (tbf) limits the rate where a host sends. The latency is made by a process that holds the packets of both hosts
for that long: each host's end is a TUN device, which needs no ``netem`` in the kernel.
"""

from __future__ import annotations

import collections
import fcntl
import os
import select
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

HOSTS = ("link-0", "link-1")
FIRST = "10.9.0.1"
PACKET = 65000
"""Bytes of the largest packet: a link like that has fewer of them to hold."""
TCP = {
    "rmem": "4096 1048576 67108864",
    "wmem": "4096 1048576 67108864",
    "slow_start_after_idle": "0",
    "congestion_control": "reno",
}
"""Windows as wide as a long link needs, and no pacing by a rate that a sender that waits never reaches."""
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


@contextmanager
def hosts(gbit: float, ms: float = 0.0) -> Iterator[tuple[str, ...]]:
    """Names of the two namespaces, whose link has so many Gbit/s, and so many milliseconds each way."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    for name in HOSTS:
        ip("netns", "add", name)
    held = 0
    try:
        ends = [_end(f"bench{number}") for number in range(len(HOSTS))]
        for number, name in enumerate(HOSTS):
            ip("link", "set", f"bench{number}", "netns", name, "name", "eth", "mtu", str(PACKET))
            ip("-n", name, "addr", "add", f"10.9.0.{number + 1}/24", "dev", "eth")
            for device in ("lo", "eth"):
                ip("-n", name, "link", "set", device, "up")
            burst = max(2 * PACKET // 1000, int(gbit * 1000))  # kB: a fast rate needs a larger bucket
            limit = ["rate", f"{gbit * 1000:g}mbit", "burst", f"{burst}kb", "latency", "200ms"]
            ip("netns", "exec", name, "tc", "qdisc", "add", "dev", "eth", "root", "tbf", *limit)
            for key, value in TCP.items():
                ip("netns", "exec", name, "sysctl", "-qw", f"net.ipv4.tcp_{key}={value}")
        held = os.fork()
        if not held:
            _hold(ends[0], ends[1], ms / 1e3)
        for end in ends:
            os.close(end)
        yield HOSTS
    finally:
        if held:
            os.kill(held, signal.SIGKILL)
            os.waitpid(held, 0)
        for name in HOSTS:
            ip("netns", "del", name)


def _end(name: str) -> int:
    """A TUN device of that name: what its host sends can be read from the file, and what is written arrives."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH14x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return file


def _hold(one: int, other: int, seconds: float) -> None:
    """Hand each packet on when it was held for so long. Ends with the process that has started it."""
    parent, to = os.getppid(), {one: other, other: one}
    held: collections.deque[tuple[float, int, bytes]] = collections.deque()  # in the order of the times
    while os.getppid() == parent:
        wait = max(0.0, held[0][0] - time.monotonic()) if held else 1.0
        for file in select.select([one, other], [], [], wait)[0]:
            held.append((time.monotonic() + seconds, to[file], os.read(file, PACKET)))
        while held and held[0][0] <= time.monotonic():
            _, file, packet = held.popleft()
            try:
                os.write(file, packet)
            except BlockingIOError:
                pass  # a queue that is full drops, as in any network
    os._exit(0)
