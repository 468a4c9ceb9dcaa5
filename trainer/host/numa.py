"""NUMA nodes: which cores and which GPUs each has, and how a process is bound to the cores of one.

Memory that a reader fills, and the copies of it to a GPU, are fastest where both are at the same node. The kernel says
in /sys which cores a node has, and at which node a PCI device is (-1: it does not know).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

SYSTEM = Path("/sys")
BUS_ID = re.compile(r"([0-9a-fA-F]+):([0-9a-fA-F]+):([0-9a-fA-F]+)\.([0-9a-fA-F])")
NOWHERE = -1


@dataclass(frozen=True)
class Nodes:
    """The NUMA nodes of this machine.

    Attributes:
        cores: of each node, those that this process may use. gpus: the node of each GPU that it can use, in CUDA's
        order; -1: not known.
    """

    cores: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    gpus: tuple[int, ...] = ()


def read(bus_ids: Sequence[str], allowed: Iterable[int], system: Path = SYSTEM) -> Nodes:
    """Read the machine's nodes.

    Args:
        bus_ids: of the GPUs, e.g. ``00000000:17:00.0``; empty: not known. allowed: cores that this process may use.
    """
    may, cores = set(allowed), dict[int, tuple[int, ...]]()
    for folder in sorted((system / "devices/system/node").glob("node[0-9]*")):
        with suppress(OSError, ValueError):
            found = tuple(sorted(may.intersection(cores_in(folder.joinpath("cpulist").read_text()))))
            if found:
                cores[int(folder.name.removeprefix("node"))] = found
    return Nodes(cores, tuple(node_of(bus_id, system) for bus_id in bus_ids))


def node_of(bus_id: str, system: Path = SYSTEM) -> int:
    """The node of a PCI device; -1: the machine does not say."""
    if (found := BUS_ID.fullmatch(bus_id)) is None:
        return NOWHERE
    domain, bus, device, function = (int(part, 16) for part in found.groups())
    place = system / "bus/pci/devices" / f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}" / "numa_node"
    try:
        return int(place.read_text())
    except (OSError, ValueError):
        return NOWHERE


def cores_in(text: str) -> list[int]:
    """The numbers of a list of the kernel, such as ``0-3,8,10-11``.

    Raises:
        ValueError: it is none.
    """
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


@contextmanager
def bound(cores: Iterable[int]) -> Iterator[None]:
    """Context manager: all threads of this process run on these cores, and so do threads and processes that it starts.
    Afterwards each thread that is still there may use the cores of before."""
    before = {thread: os.sched_getaffinity(thread) for thread in _threads()}
    for thread in before:
        _bind(thread, cores)
    try:
        yield
    finally:
        own = before.get(os.getpid(), set())
        for thread in _threads():
            _bind(thread, before.get(thread, own))


def _threads() -> list[int]:
    return [int(thread.name) for thread in Path("/proc/self/task").iterdir()]


def _bind(thread: int, cores: Iterable[int]) -> None:
    with suppress(ProcessLookupError):  # the thread has ended
        os.sched_setaffinity(thread, cores)
