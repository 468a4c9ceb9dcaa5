"""Finds this machine's hardware without importing torch: cores, instruction sets, GPUs, a C++ compiler."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Gpu:
    """One visible GPU and its CUDA compute capability, e.g. (9, 0)."""

    name: str
    capability: tuple[int, int]


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The instruction-set flags of the first core (Linux), e.g. ``amx_bf16``; empty on other systems."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


@functools.cache
def gpus() -> tuple[Gpu, ...]:
    """The NVIDIA GPUs that CUDA would show to this process, according to nvidia-smi."""
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
    """For each GPU that nvidia-smi shows: percent of the time it was busy, and MiB of its memory in use."""
    try:
        asked = _asked_of_gpus("utilization.gpu,memory.used") if gpus() else []
        return [(float(busy), float(used)) for busy, used in asked]
    except ValueError:  # some cards answer [N/A]
        return []


def _asked_of_gpus(properties: str) -> list[list[str]]:
    """Query nvidia-smi for properties of each GPU; empty without a GPU."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    query = [smi, f"--query-gpu={properties}", "--format=csv,noheader,nounits"]
    try:
        # nvidia-smi
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout  # nosec B603
    except (OSError, subprocess.SubprocessError):
        return []
    values = properties.count(",")
    return [[value.strip() for value in line.rsplit(",", values)] for line in answer.strip().splitlines()]


def cpp_compiler() -> str | None:
    """The path of a C++ compiler that this machine has (torch.compile calls it on the CPU); None without one."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
