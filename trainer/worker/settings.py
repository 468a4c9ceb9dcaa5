"""Process-wide settings of torch and the C library during a run, and the seeds of all random generators."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import torch

from trainer.config.run_config import RunConfig
from trainer.host import hardware
from trainer.host.memory import keep_freed_memory
from trainer.planning.plan import Plan
from trainer.strategies.seat import Seat


@contextlib.contextmanager
def settings(config: RunConfig, plan: Plan, seat: Seat) -> Iterator[None]:
    """Context manager: sets threads, determinism and the like for a run in this process, and restores them.

    A process may do several runs, such as the jobs of a sweep, and nothing of one is left to the next. So a GPU gets
    the memory for its matrix products by the same rule in all runs, because torch reads the rule once.
    """
    threads, deterministic = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    benchmark = torch.backends.cudnn.benchmark
    try:
        if plan.chosen.keep_memory:
            keep_freed_memory()
        torch.set_num_threads(int(plan.chosen.threads))
        if seat.device.startswith("cuda"):
            os.environ.setdefault(hardware.CUBLAS, hardware.REPEATABLE[0])
            torch.cuda.set_device(torch.device(seat.device))
            if torch.cuda.is_initialized():  # by a run before
                torch.cuda.reset_peak_memory_stats(seat.device)
            torch.backends.cudnn.benchmark = not config.execution.deterministic
        if config.execution.deterministic:
            torch.use_deterministic_algorithms(True)
        with _compiler_cache(plan.chosen.compiling.compile), _gpu_settings(plan, seat):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(deterministic)
        torch.backends.cudnn.benchmark = benchmark


def _gpu_settings(plan: Plan, seat: Seat) -> contextlib.AbstractContextManager[None]:
    """Context manager: what the plan has chosen for GPUs holds."""
    if not seat.device.startswith("cuda"):
        return nullcontext()
    from trainer.worker.gpu_settings import on_gpu

    return on_gpu(plan.chosen.gpu, torch.device(seat.device), plan.chosen.cuda_graph)


def _compiler_cache(compiles: bool) -> contextlib.AbstractContextManager[None]:
    """Context manager: compiled code is saved in folders of this user."""
    if not compiles:
        return nullcontext()
    from trainer.worker.compiling import own_code

    return own_code()


def seed_all(seed: int) -> None:
    """Seed every random generator of this worker, before it makes its model and before it trains."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
