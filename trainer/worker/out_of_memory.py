"""Turns an out-of-memory error into a sentence: the batch, the peak, and how to do the same update in less memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from trainer.errors import RunFailed, first_line
from trainer.host.memory import GIB
from trainer.planning.plan import Plan
from trainer.strategies.seat import Seat
from trainer.wording import counted
from trainer.worker.training import Training

SAID = (
    "can't allocate memory",
    "bad_alloc",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "could not create a memory",
)
"""Texts by which torch and its libraries say in a RuntimeError that memory is not enough."""


@contextlib.contextmanager
def memory_named(run: Training, plan: Plan, seat: Seat) -> Iterator[None]:
    """Context manager: a failed allocation becomes a RunFailed of one sentence.

    Raises:
        RunFailed: one did.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_memory(error):
            raise
        raise RunFailed(_sentence(error, run.progress.step, plan, seat.device)) from error


def is_memory(error: BaseException | None) -> bool:
    """Whether an error says that memory has run out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in SAID)


def _sentence(error: Exception, step: int, plan: Plan, device: str) -> str:
    where = f"after {counted(step, 'update')}, with batches of {counted(plan.batches.size, 'sample')} per worker"
    return f"{device} is out of memory {where}{_peak(device)}. {_instead(plan)} (torch: {first_line(error)})"


def _peak(device: str) -> str:
    """Peak memory of this process and the memory of its device, in words; empty if torch does not count it."""
    if not device.startswith("cuda"):
        return ""
    peak, (_, there) = torch.cuda.max_memory_allocated(device), torch.cuda.mem_get_info(device)
    return f"; the peak of its tensors was {peak / GIB:.1f} of {there / GIB:.1f} GiB"


def _instead(plan: Plan) -> str:
    """What to type to need less memory."""
    if plan.batches.size < 2 or plan.batches.global_size % (plan.topology.workers * plan.batches.merge * 2):
        return "A smaller data.batch_size, precision=bf16 or a smaller model needs less"
    update = (
        f"data.global_batch_size={plan.batches.global_size} strategy.gradient_merge.k_steps={2 * plan.batches.merge}"
    )
    return f"The same update in two parts needs less: {update}. So does precision=bf16"
