"""What this machine has, found out without importing torch: cores, instruction sets, GPUs, a C++ compiler."""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Gpu:
    """One visible GPU and its CUDA compute capability, e.g. (9, 0)."""

    name: str
    capability: tuple[int, int]


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Instruction-set flags of the first core (Linux), e.g. ``amx_bf16``; empty elsewhere."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


@functools.cache
def gpus() -> tuple[Gpu, ...]:
    """The NVIDIA GPUs that CUDA would show to this process, asked of nvidia-smi."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "" or visible == "-1":
        return ()
    found = []
    for name, capability in _asked_of_gpus("name,compute_cap"):
        major, _, minor = capability.partition(".")
        found.append(Gpu(name, (int(major), int(minor or 0))))
    if visible is not None:
        found = found[: len([v for v in visible.split(",") if v.strip()])]
    return tuple(found)


def gpu_loads() -> list[tuple[float, float]]:
    """Of each GPU that nvidia-smi shows now: percent of the time in which it was busy, MiB of its memory in use."""
    try:
        asked = _asked_of_gpus("utilization.gpu,memory.used") if gpus() else []
        return [(float(busy), float(used)) for busy, used in asked]
    except ValueError:  # some cards answer [N/A]
        return []


def _asked_of_gpus(properties: str) -> list[list[str]]:
    """What nvidia-smi says of each GPU; nothing where there is none."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    query = [smi, f"--query-gpu={properties}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout  # nvidia-smi  # nosec B603
    except (OSError, subprocess.SubprocessError):
        return []
    values = properties.count(",")
    return [[value.strip() for value in line.rsplit(",", values)] for line in answer.strip().splitlines()]


def cpp_compiler() -> str | None:
    """The C++ compiler that torch.compile would call on the CPU."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen on that port of this host now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_port(host: str) -> int:
    """A port of this host on which nobody listens now."""
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


def address() -> str:
    """An IPv4 address of this host that others may reach; the loopback's where it has no other."""
    found = [e.address for entries in psutil.net_if_addrs().values() for e in entries if e.family == socket.AF_INET]
    return str(next((a for a in found if not a.startswith("127.")), "127.0.0.1"))


def free_memory() -> int:
    """Bytes that programs can still take without swapping."""
    return int(psutil.virtual_memory().available)


def free_disk(folder: Path) -> int:
    """Bytes that can still be written below a folder, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def interface_towards(host: str) -> str | None:
    """The network interface by which this host reaches that one (or has its address); None where that cannot be said."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing: the kernel chooses the way and the address to be reached at
        except OSError:
            return None
        return interface_of(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The network interface with that IPv4 address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == address for entry in addresses):
            return str(name)
    return None
