"""Finds this machine's hardware without importing torch: cores, instruction sets, GPUs, a C++ compiler."""

from __future__ import annotations

import functools
import os
import shutil
from ctypes import CDLL
from pathlib import Path

from trainer.host import nvml
from trainer.host.found_gpus import Found, joined
from trainer.host.nvml import Driver, Load
from trainer.host.torch_gpus import Answer, Question
from trainer.host.visible_gpus import Gpu, Visible, hides_all, visible

CUDA_LIBRARY = "libcuda.so.1"
NOWHERE = ("", "void", "none")
"""Values of NVIDIA_VISIBLE_DEVICES with which a container gets no GPU."""
_ANSWERS: list[Answer] = []
"""Torch's answer, once it has been asked in this process."""


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


def gpus() -> tuple[Gpu, ...]:
    """The NVIDIA GPUs that this process can use, in CUDA's order: by torch's answer, once it was asked, else by the
    driver's."""
    return found().gpus


def found() -> Found:
    """The GPUs that this process can use, and what is to be said about them."""
    return joined(_driver(), _shown(), _ANSWERS[-1] if _ANSWERS else _remembered())


def gpu_loads() -> list[Load]:
    """The load of each of :func:`gpus`; empty: the driver cannot be asked."""
    return nvml.loads([gpu.uuid for gpu in here]) if (here := gpus()) else []


class TorchCheck:
    """Asks torch for its GPUs, beside the command; its answer then holds for :func:`gpus` in this process.

    Torch is asked once in a process, and only where there may be a GPU.
    """

    def __init__(self) -> None:
        self.question: Question | None = None

    def start(self, plan: bool) -> None:
        """Ask torch, if it has to be asked; the answer comes seconds later.

        Args:
            plan: only a plan is asked for: what torch said to an earlier command is enough.
        """
        known = bool(_ANSWERS) or (plan and _remembered() is not None)
        if self.question is None and not known and may_have_gpu():
            self.question = Question()

    def changes_gpus(self) -> bool:
        """Wait for torch, if it was asked, and return whether a plan for its GPUs is another one."""
        if self.question is None or _ANSWERS:
            return False
        before, answer = found().matters, self.question.answer()
        learn(answer)
        if answer.gpus:
            from trainer.host.gpu_memo import remember_answer

            remember_answer(answer, _driver())
        return found().matters != before

    def end(self) -> None:
        """End the question, if nobody waits for it any more."""
        if self.question is not None:
            self.question.end()


def learn(answer: Answer) -> None:
    """Let torch's answer hold in this process."""
    _ANSWERS.append(answer)


def _device_files() -> bool:
    """Whether the driver's device files are there: of cards, or of Windows' subsystem for Linux."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


@functools.cache
def _driver() -> Driver:
    return nvml.read()


@functools.cache
def _shown() -> Visible:
    return visible(_driver().cards, os.environ)


@functools.cache
def _remembered() -> Answer | None:
    if not _shown().gpus:
        return None
    from trainer.host.gpu_memo import remembered_answer  # machines without a GPU do not import it

    return remembered_answer(_driver())


def may_have_gpu() -> bool:
    """Whether to ask torch: the driver shows a GPU, or cannot be asked and there is another sign of one.

    A container with the capability ``compute`` alone has CUDA's library and the devices, and no NVML. The image of a
    container may set NVIDIA_VISIBLE_DEVICES on a machine without any GPU; then there is no CUDA library."""
    if _shown().gpus:
        return True
    if not _driver().why or hides_all(os.environ):
        return False
    if not _device_files() and os.environ.get("NVIDIA_VISIBLE_DEVICES", "") in NOWHERE:
        return False
    try:
        CDLL(CUDA_LIBRARY)
    except OSError:
        return False
    return True


def cpp_compiler() -> str | None:
    """The path of a C++ compiler that this machine has (torch.compile calls it on the CPU); None without one."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
