"""Process-wide settings of torch and the C library during a run."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from contextlib import nullcontext

import torch

from trainer.config.run_config import RunConfig
from trainer.planning.plan import Plan
from trainer.strategies.contract import Seat
from trainer.worker.compiling import own_code


@contextlib.contextmanager
def settings(config: RunConfig, plan: Plan, seat: Seat) -> Iterator[None]:
    """Context manager: sets threads, determinism and the like for a run in this process, and restores them."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    benchmark = torch.backends.cudnn.benchmark
    if plan.chosen.keep_memory:
        keep_freed_memory()
    torch.set_num_threads(int(plan.chosen.threads))
    if seat.device.startswith("cuda"):
        torch.cuda.set_device(torch.device(seat.device))
        torch.backends.cudnn.benchmark = not config.execution.deterministic
    if config.execution.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        with own_code() if config.compile else nullcontext():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.benchmark = benchmark


def keep_freed_memory() -> None:
    """Make glibc keep freed memory: to give it back to the kernel each step costs 8-12% of a CPU step."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        m_trim_threshold, m_mmap_max = -1, -4
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)
    except (OSError, AttributeError):
        pass
