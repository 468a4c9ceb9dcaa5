"""What this machine has, found out without importing torch: cores, instruction sets, GPUs, a C++ compiler."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


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
    smi = shutil.which("nvidia-smi")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if smi is None or visible == "" or visible == "-1":
        return ()
    query = [smi, "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    found = []
    for line in answer.strip().splitlines():
        name, capability = line.rsplit(",", 1)
        major, _, minor = capability.strip().partition(".")
        found.append(Gpu(name.strip(), (int(major), int(minor or 0))))
    if visible is not None:
        found = found[: len([v for v in visible.split(",") if v.strip()])]
    return tuple(found)


def gpu_loads() -> list[tuple[float, float]]:
    """Of each GPU that nvidia-smi shows now: percent of the time in which it was busy, MiB of its memory in use."""
    smi = shutil.which("nvidia-smi")
    if smi is None or not gpus():
        return []
    query = [smi, "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return [(float(busy), float(used)) for busy, used in (line.split(",") for line in answer.strip().splitlines())]
    except (OSError, subprocess.SubprocessError, ValueError):  # some cards answer [N/A]
        return []


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


def free_memory() -> int:
    """Bytes that programs can still take without swapping (Linux); elsewhere half of all."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def free_disk(folder: Path) -> int:
    """Bytes that can still be written below a folder, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


class _Addresses(ctypes.Structure):
    """``struct ifaddrs`` of getifaddrs(3), as far as it is read."""


_Addresses._fields_ = [
    ("next", ctypes.POINTER(_Addresses)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(ctypes.c_ubyte)),
]


def interface_towards(host: str) -> str | None:
    """The network interface by which this host reaches that one (or has its address); None where that cannot be said."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing: the kernel chooses the way and the address to be reached at
        except OSError:
            return None
        return interface_of(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The network interface with that IPv4 address (Linux)."""
    if sys.platform != "linux":
        return None
    libc, first = ctypes.CDLL(None, use_errno=True), ctypes.POINTER(_Addresses)()
    if libc.getifaddrs(ctypes.byref(first)):
        return None
    try:
        entry = first
        while entry:
            raw = entry.contents.address
            family = raw[0] | raw[1] << 8 if raw and sys.byteorder == "little" else raw[0] << 8 | raw[1] if raw else -1
            if family == socket.AF_INET and socket.inet_ntoa(bytes(raw[4:8])) == address:
                return str(entry.contents.name.decode())
            entry = entry.contents.next
        return None
    finally:
        libc.freeifaddrs(first)
