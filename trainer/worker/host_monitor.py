"""Measures how busy each host is (CPU, memory, GPUs), as points with the host's number."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import torch
import torch.distributed as dist

from trainer.host import hardware, json_text
from trainer.run_folder.report import Report

FIRST_S = 1.0
END_S = 5.0
"""Longest wait for the last measurement."""
LEAST_S = 0.1
"""How busy processors were over less is chance."""
MIB = 1 << 20


@contextmanager
def watched(node: int, nodes: int, store: Any, report: Report, every_s: float) -> Iterator[None]:
    """Context manager: a thread measures this host's load; host 0's worker writes the points of all hosts.

    Args:
        node, nodes: the host's number, and how many there are.
        store: the launcher's, where the hosts meet; None: there is one host.
        every_s: seconds between two measurements, of which the first comes early.
    """
    if torch.cuda.is_initialized():  # this worker trains on a GPU, and CUDA's own order of GPUs is at hand
        from trainer.host import ask_torch, usable_gpus

        usable_gpus.learn(ask_torch.answer_here())
    monitor = Monitor(node, nodes, store, report, every_s)
    monitor.start()
    try:
        yield
    finally:
        monitor.end()


class Monitor(threading.Thread):
    """Measures this host's load.
    Hosts other than host 0 leave their measurements in the launcher's store, which host 0 reads."""

    def __init__(self, node: int, nodes: int, store: Any, report: Report, every_s: float) -> None:
        super().__init__(daemon=True, name="system")
        self.node = node
        self.nodes = nodes
        self.report = report
        self.every_s = every_s
        self.done = threading.Event()
        self.store: Any = None
        if nodes > 1 and store is not None:  # a connection of its own: a worker may wait in its own for long
            self.store = store.clone().under("system")
        self.seen: dict[int, bytes] = {}

    def run(self) -> None:
        """Measure repeatedly until the end, and a last time then if enough time has passed."""
        psutil.cpu_percent()  # the first call of each thread has nothing to compare with, and answers 0
        pause, began = min(FIRST_S, self.every_s), time.monotonic()
        while not self.done.wait(pause):
            self.measure()
            pause, began = self.every_s, time.monotonic()
        if time.monotonic() - began > LEAST_S:
            self.measure()

    def end(self) -> None:
        """Stop measuring after a last measurement. A store that does not answer is not waited for long."""
        self.done.set()
        self.join(END_S)

    def measure(self) -> None:
        """Make one measurement and read new ones of other hosts. Errors are ignored: a measurement is not worth a run,
        and the launcher with its store may be gone already.
        """
        with suppress(OSError, ValueError, RuntimeError, psutil.Error, dist.DistError):
            self._measure()

    def _measure(self) -> None:
        own = int(time.time() * 1000), _measured()
        if self.node == 0:
            self.report.system(0, *own)
        if self.node and self.store is not None:
            self.store.set(str(self.node), json.dumps(own))
        elif self.store is not None:
            self._fetch()

    def _fetch(self) -> None:
        for node in range(1, self.nodes):
            if not self.store.check([str(node)]):
                continue
            note = self.store.get(str(node))
            if self.seen.get(node) != note:
                self.seen[node] = note
                self.report.system(node, *json_text.loads(note))


def _measured() -> dict[str, float]:
    """This host's load since the last call: percent of all cores, memory, and of each GPU as far as its driver says."""
    memory = psutil.virtual_memory()
    found = {
        "cpu_percent": psutil.cpu_percent(),
        "memory_percent": memory.percent,
        "memory_used_mib": round((memory.total - memory.available) / MIB, 1),
    }
    for number, load in enumerate(hardware.gpu_loads()):
        of_gpu = {f"gpu{number}_percent": load.busy, f"gpu{number}_memory_used_mib": load.used}
        found |= {name: value for name, value in of_gpu.items() if value is not None}
    return found
