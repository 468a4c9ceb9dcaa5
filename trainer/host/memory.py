"""This machine's memory: how much this process and its children can still use, and how much processes hold."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path

GIB = 1 << 30
CGROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60
"""Larger values mean no limit in cgroup v1."""
FILES = {"": ("memory.max", "memory.current"), "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}
"""Files of the limit and of the used memory, by the controller in /proc/self/cgroup (v2: empty)."""


def free(cgroups: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """The bytes of memory that can still be used, by the machine and each cgroup (container, job) of this process."""
    import psutil

    return max(0, min([int(psutil.virtual_memory().available), *_free_of_groups(cgroups, own)]))


def free_of_machine() -> int:
    """The bytes of RAM that are available without swapping, whatever limits this process has."""
    import psutil

    return int(psutil.virtual_memory().available)


def _free_of_groups(cgroups: Path, own: Path) -> Iterable[int]:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        name = "memory" if "memory" in controllers.split(",") else controllers
        if name not in FILES:
            continue
        root = cgroups / name
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            if not group.is_relative_to(root):
                break
            if (left := _free_of(group, *FILES[name])) is not None:
                yield left


def _free_of(group: Path, limit: str, used: str) -> int | None:
    """The free part of a group's limit; None: no limit. Inactive file pages count as free."""
    try:
        most, now = (group / limit).read_text().strip(), int((group / used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if most == "max" or int(most) >= UNLIMITED:
        return None
    return int(most) - now + int(stat.get("inactive_file", 0))


def held_by(pids: Iterable[int]) -> int:
    """The memory of these processes in bytes (PSS: shared pages are divided among the processes)."""
    import psutil

    held = 0
    for pid in pids:
        try:
            held += psutil.Process(pid).memory_full_info().pss
        except psutil.Error:
            continue
    return held


def own(name: str) -> int:
    """The bytes that the kernel counts for this process: ``VmRSS`` (held), ``VmHWM`` (peak), ``VmData`` (asked for)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def of_children() -> int:
    """The unshared memory of this process's children, in bytes (USS)."""
    import psutil

    held = 0
    for child in psutil.Process().children(recursive=True):
        try:
            held += child.memory_full_info().uss
        except psutil.Error:
            continue
    return held


def keep_freed_memory() -> None:
    """Make glibc keep freed memory; returning it to the kernel costs 8-12% of each step on a CPU."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        m_trim_threshold, m_mmap_max = -1, -4
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)
    except (OSError, AttributeError):
        pass
