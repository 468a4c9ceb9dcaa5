"""data.num_workers=auto: adds reading processes if the loop is measured to wait for data while cores are idle."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import psutil

from trainer.config.schema import DataConfig
from trainer.data.prefetch import ready_each
from trainer.host import hardware

UPDATES = 50
"""Of the first epoch, that are measured; fewer where the epoch has fewer, but no fewer than ``LEAST``."""
LEAST = 5
BEARABLE = 0.05
"""Share of the time that a loop may wait for data."""
WORTH_A_PROCESS = 0.25
"""Of a core that is idle, from which on one more process is worth its start."""
CGROUP = Path("/sys/fs/cgroup")


class HostMeter(Protocol):
    """Protocol of what :class:`Growth` measures of the host, so that tests can replace it."""

    def seconds(self) -> float:
        """The time on a clock that only goes forward, in seconds."""

    def idle(self) -> tuple[float, ...]:
        """Idle core-seconds so far, one number for each way to count them; the smallest increase counts."""


class Host:
    """Measures this host by the system's own counters."""

    def seconds(self) -> float:
        """The time on a clock that only goes forward, in seconds."""
        return time.perf_counter()

    def idle(self) -> tuple[float, ...]:
        """Idle core-seconds of the cores that this process may use; in a container also those unused of its limit."""
        every = psutil.cpu_times(percpu=True)
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(every))
        counted = [every[core] for core in allowed if core < len(every)] or every
        found = sum(core.idle + getattr(core, "iowait", 0.0) for core in counted)
        return (found, *_unused_quota(time.perf_counter()))


def _unused_quota(now: float) -> tuple[float, ...]:
    """Core-seconds that this container could have used until now and has not (cgroup v2); none without a limit."""
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
        used = next(
            line.split()[1] for line in (CGROUP / "cpu.stat").read_text().splitlines() if line.startswith("usage_usec")
        )
        return () if quota == "max" else (int(quota) / int(period) * now - int(used) / 1e6,)
    except (OSError, ValueError, StopIteration):
        return ()


@dataclass
class Growth:
    """Decides once, after an epoch's first updates, whether more reading processes would keep the loop from waiting.

    The first update is not counted: in it the processes start.

    Attributes:
        readers: processes that read for this worker now.
        sharing: workers of this host, which share its idle cores.
        most: processes that may read for this worker.
        prefetch: batches that each of so many keeps ready.
        meter: measures the host.
        updates: that are measured.
        said: what was found, once it is, where the loop waited.
    """

    readers: int
    sharing: int
    most: int
    prefetch: Callable[[int], int]
    meter: HostMeter
    updates: int = UPDATES
    said: str = ""

    def __post_init__(self) -> None:
        self.seen = 0
        self.decided = False
        self.before: tuple[float, float, tuple[float, ...]] = (0.0, 0.0, ())

    def updated(self, waited: float) -> int | None:
        """Count an update, with the seconds waited for data so far; returns a new number of reading processes, or None.

        None: as many as before.
        """
        if self.decided:
            return None
        self.seen += 1
        if self.seen == 1:
            self.before = self.meter.seconds(), waited, self.meter.idle()
        return self._decide(waited) if self.seen == self.updates else None

    def epoch_over(self, waited: float) -> int | None:
        """Decide at the end of an epoch with few updates; returns a new number of reading processes, or None."""
        return None if self.decided or self.seen < LEAST else self._decide(waited)

    def found(self) -> dict[str, dict[str, Any]]:
        """What was measured, for the plan: ``chosen`` numbers and ``why``; empty if the loop did not wait."""
        if not self.said:
            return {}
        chosen = {"num_workers": self.readers, "prefetch": self.prefetch(self.readers)}
        return {"chosen": chosen, "why": {"num_workers": self.said}}

    def _decide(self, waited: float) -> int | None:
        self.decided = True
        since, waited_then, idle_then = self.before
        seconds = max(1e-9, self.meter.seconds() - since)
        share = (waited - waited_then) / seconds
        idle = max(0.0, min(now - then for now, then in zip(self.meter.idle(), idle_then, strict=True)) / seconds)
        wanted = enough(self.readers, share, idle / self.sharing, self.most)
        if share <= BEARABLE:
            return None
        found = (
            f"the first {self.seen} updates waited for data {share:.0%} of their time, and {idle:.1f} cores of "
            f"the host were idle"
        )
        goes_on = (
            f"from then on {wanted} processes read, not {self.readers}"
            if wanted > self.readers
            else "no more processes would help"
        )
        self.said = f"{found}: {goes_on}"
        print(f"data.num_workers=auto: {self.said}", flush=True)
        before, self.readers = self.readers, wanted
        return wanted if wanted > before else None


def enough(readers: int, waiting: float, idle: float, most: int) -> int:
    """How many reading processes the loop needs if it waits that share of its time with ``readers`` processes.

    No more than there are idle cores for, a quarter of one included, and than ``most``; no fewer than there are.
    """
    if waiting <= BEARABLE:
        return readers
    wanted = math.ceil(readers / max(1e-3, 1.0 - waiting))
    return max(readers, min(wanted, readers + math.floor(idle + 1 - WORTH_A_PROCESS), most))


def growing_readers(data: DataConfig, readers: int, prefetch: int, workers_here: int) -> Growth | None:
    """Return the :class:`Growth` of a run with data.num_workers=auto, or None if the number of processes is fixed.

    Args:
        readers: that were chosen; prefetch: batches that each keeps ready.
        workers_here: on this host.
    """
    if data.num_workers not in (None, "auto") or not readers:
        return None
    sharing = 1 if data.read == "scatter" else workers_here
    ready = ready_each if data.prefetch == "auto" else lambda _: prefetch
    return Growth(readers, sharing, max(readers, hardware.cores()), ready, Host())


class Rest:
    """A DataLoader's ``batch_sampler`` that skips the first ``first`` batches of an epoch."""

    def __init__(self, addresses: Iterable[Any]) -> None:
        self.addresses, self.first = addresses, 0

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.addresses), self.first, None)
