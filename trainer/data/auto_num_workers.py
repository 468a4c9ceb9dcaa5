"""data.num_workers=auto: adds reading processes if the loop is measured to wait for data while cores are idle.

Beside a GPU what counts is the time in which the GPU had nothing to do while the loop waited.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from trainer.config.schema import DataConfig
from trainer.data.prefetch import ready_each
from trainer.host import hardware

UPDATES = 50
"""Updates that are measured, of each epoch; all of a shorter epoch, but at least ``LEAST``."""
LEAST = 5
BEARABLE = 0.05
"""Share of the time that a loop may wait for data."""
WORTH_A_PROCESS = 0.25
"""Idle share of a core from which one more process is worth its start."""
CGROUP = Path("/sys/fs/cgroup")


class Host:
    """Measures this host by the system's own counters."""

    def seconds(self) -> float:
        """The time on a clock that only goes forward, in seconds."""
        return time.perf_counter()

    def idle(self) -> tuple[float, ...]:
        """Idle core-seconds so far, by each way to count them: the smallest increase counts.

        Idle time of the cores that this process may use; in a container also unused time of its CPU quota.
        """
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
    """Decides once in each epoch, after its first updates, whether more reading processes would keep the loop from
    waiting. An epoch that is too short is measured with the next.

    The first update is not counted: in it the processes start.

    Attributes:
        readers: reading processes of this worker now; most: greatest number of them.
        sharing: workers of this host, which share its idle cores.
        prefetch: number of reading processes -> batches that each keeps ready.
        meter: measures the host.
        updates: number of updates that are measured.
        said: the last decision for more processes in a sentence, or the first one that no more would help; empty: the
        loop did not wait, or nothing is decided yet.
    """

    readers: int
    sharing: int
    most: int
    prefetch: Callable[[int], int]
    meter: Host
    updates: int = UPDATES
    said: str = ""

    def __post_init__(self) -> None:
        self.seen = 0
        self.decided = False
        self.before: tuple[float, float, tuple[float, ...]] = (0.0, 0.0, ())

    def epoch_begins(self) -> None:
        """Measure again, unless the epoch before was too short to decide."""
        if self.decided:
            self.seen, self.decided = 0, False

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
        """The decision for the plan, as ``chosen`` and ``why``; empty if the loop did not wait."""
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
        wanted = readers_needed(self.readers, share, idle / self.sharing, self.most)
        if share <= BEARABLE:
            return None
        if self.said and wanted == self.readers:
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


def readers_needed(readers: int, waiting: float, idle: float, most: int) -> int:
    """The number of reading processes that the loop needs if ``readers`` keep it waiting for this share of its time.

    At least ``readers``; at most ``most``, and one more for each idle core, where a quarter of a core counts as one.
    """
    if waiting <= BEARABLE:
        return readers
    wanted = math.ceil(readers / max(1e-3, 1.0 - waiting))
    return max(readers, min(wanted, readers + math.floor(idle + 1 - WORTH_A_PROCESS), most))


def growing_readers(data: DataConfig, readers: int, prefetch: int, workers_here: int) -> Growth | None:
    """Return the :class:`Growth` of a run with data.num_workers=auto, or None if the number of processes is fixed.

    Args:
        readers, prefetch: reading processes of this worker, and batches that each keeps ready.
        workers_here: workers on this host.
    """
    if data.num_workers not in (None, "auto") or not readers:
        return None
    sharing = 1 if data.read == "scatter" else workers_here
    ready = ready_each if data.prefetch == "auto" else lambda _: prefetch
    return Growth(readers, sharing, max(readers, hardware.cores()), ready, Host())
