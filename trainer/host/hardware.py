"""Finds this machine's hardware without importing torch: cores, instruction sets, GPUs, a C++ compiler."""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
from ctypes import CDLL
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from trainer.host.numa import Nodes
    from trainer.host.nvml import Load
    from trainer.host.visible_gpus import Gpu

DRIVER, CUDA = "libnvidia-ml.so.1", "libcuda.so.1"
CUBLAS, REPEATABLE = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
"""The variable for the memory of matrix products on a GPU, and its values with which they can be repeated (cuBLAS)."""
NOWHERE = ("", "void", "none")
"""Values of NVIDIA_VISIBLE_DEVICES with which a container gets no GPU."""


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


class AboutGpus(NamedTuple):
    """Why this process has no GPU, ``no GPU: REASON``, and what would help; or a warning about its GPUs."""

    why: str = ""
    remedy: str = ""
    concern: str = ""


@functools.cache
def has_driver() -> bool:
    """Whether there is a trace of a driver for NVIDIA's GPUs. A machine without one imports no file about GPUs."""
    return _loads(DRIVER) or has_cuda()


@functools.cache
def has_cuda() -> bool:
    """Whether there is a sign of a GPU besides the driver's library: its device, and CUDA's library.

    A container with the capability ``compute`` alone has these, and no NVML. An image may set NVIDIA_VISIBLE_DEVICES on
    a machine without any GPU; then there is no CUDA library."""
    wanted = _device_files() or os.environ.get("NVIDIA_VISIBLE_DEVICES", "") not in NOWHERE
    return wanted and _loads(CUDA)


def gpus() -> tuple[Gpu, ...]:
    """The NVIDIA GPUs that this process can use, in CUDA's order: torch's answer if it was asked, else the driver's."""
    if not has_driver():
        return ()
    from trainer.host.usable_gpus import found

    return found().gpus


def about_gpus() -> AboutGpus:
    """Why there is no GPU, or a warning about those that there are."""
    if not has_driver():
        return AboutGpus(f"no GPU: the driver's {DRIVER} was not found")
    from trainer.host.usable_gpus import found

    return AboutGpus(found().why, found().remedy, found().concern)


def numa_nodes() -> Nodes | None:
    """The NUMA nodes of this machine and of :func:`gpus`; None without a GPU, for which alone they matter."""
    if not (here := gpus()):
        return None
    from trainer.host import numa
    from trainer.host.nvml import bus_ids

    return numa.read(bus_ids([gpu.uuid for gpu in here]), os.sched_getaffinity(0))


def gpu_loads() -> list[Load]:
    """The load of each of :func:`gpus`; empty: the driver cannot be asked."""
    if not (here := gpus()):
        return []
    from trainer.host.nvml import loads

    return loads([gpu.uuid for gpu in here])


def _loads(library: str) -> bool:
    try:
        return CDLL(library) is not None
    except OSError as error:
        return "No such file" not in str(error)  # it is there; who needs it says what is wrong with it


def _device_files() -> bool:
    """Whether the driver's device files are there: of cards, or of Windows' subsystem for Linux."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or is_windows_subsystem()


def is_windows_subsystem() -> bool:
    """Whether this is Windows' subsystem for Linux."""
    return Path("/dev/dxg").exists()


def c_compiler() -> str | None:
    """The path of a C compiler that this machine has (Triton calls it on GPUs); None without one."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def cpp_compiler() -> str | None:
    """The path of a C++ compiler that this machine has (torch.compile calls it on the CPU); None without one."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def python_header() -> Path:
    """The path of Python.h, which compiled kernels include; a Python without its development files has none there."""
    return Path(sysconfig.get_path("include")) / "Python.h"
