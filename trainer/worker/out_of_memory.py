"""Turns an out-of-memory error into a sentence: the batch, the peak, and how to do the same in less memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from trainer.errors import RunFailed, first_line
from trainer.host.memory import GIB
from trainer.planning.plan import Plan
from trainer.run_folder.report import Phase, Report
from trainer.wording import counted

OF_HOST = ("can't allocate memory", "bad_alloc", "could not create a memory")
"""Texts by which torch and its libraries say in a RuntimeError that the memory of the host is not enough."""
SAID = (*OF_HOST, "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""The same of any memory."""
EVALUATING = "in an evaluation"


@contextlib.contextmanager
def memory_named(plan: Plan, device: str, report: Report) -> Iterator[None]:
    """Context manager around all that a worker does: a failed allocation becomes a RunFailed of one sentence.

    Args:
        report: of this worker; its ``phase`` and ``step`` tell where the allocation failed.

    Raises:
        RunFailed: an allocation failed.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_memory(error):
            raise
        raise RunFailed(_sentence(error, plan, device, report)) from error


def is_memory(error: BaseException | None) -> bool:
    """Whether an error says that memory has run out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in SAID)


def _sentence(error: Exception, plan: Plan, device: str, report: Report) -> str:
    by_host = isinstance(error, MemoryError) or any(said in str(error) for said in OF_HOST)
    if device != "cpu" and by_host:
        who, instead = "the host", "A smaller data.num_workers, data.prefetch or data.batch_size needs less"
    else:
        who, instead = device, _instead(plan, report.phase)
    peak = _peak(device) if who == device else ""
    return f"{who} is out of memory {_where(plan, report)}{peak}. {instead} (torch: {first_line(error)})"


def _where(plan: Plan, report: Report) -> str:
    """At which moment, and with which batches, in words."""
    training, after = plan.mode == "train", f"after {counted(report.step, 'update')}"
    if report.phase is Phase.START:
        return "before the first batch"
    if report.phase is Phase.EVALUATION:
        moment, size = f"{EVALUATING}{f' {after}' * training}", plan.batches.val_size
    else:
        moment = after if training else f"after {counted(report.step, 'batch')}"
        size = plan.batches.size
    return f"{moment}, with batches of {counted(size, 'sample')} per worker"


def _peak(device: str) -> str:
    """Peak memory of this process and the memory of its device, in words; empty if torch does not count it."""
    if not device.startswith("cuda"):
        return ""
    with contextlib.suppress(RuntimeError):  # a GPU without room for a process answers nothing
        peak, (free, there) = torch.cuda.max_memory_allocated(device), torch.cuda.mem_get_info(device)
        others = there - free - torch.cuda.memory_reserved(device)
        held = f", and {others / GIB:.1f} GiB are held by others" if others >= 2 * GIB else ""  # CUDA itself has some
        return f"; the peak of its tensors was {peak / GIB:.1f} of {there / GIB:.1f} GiB{held}"
    return "; other processes may hold its memory (nvidia-smi)"


def _instead(plan: Plan, phase: Phase) -> str:
    """What to type to need less memory."""
    if phase is Phase.START:
        return "A smaller model needs less" if plan.mode == "train" else "Another GPU or device=cpu may have enough"
    if phase is not Phase.TRAINING:
        key, what = ("data.val_batch_size", "metrics") if phase is Phase.EVALUATION else ("data.batch_size", "rows")
        size = plan.batches.val_size if phase is Phase.EVALUATION else plan.batches.size
        return f"Smaller batches give the same {what}: {key}={size // 2}" if size > 1 else f"Only {_less(plan)}"
    if plan.batches.size < 2 or plan.batches.global_size % (plan.topology.workers * plan.batches.merge * 2):
        return f"A smaller data.batch_size{', ' if _wide(plan) else ' or '}{_less(plan)}"
    update = (
        f"data.global_batch_size={plan.batches.global_size} strategy.gradient_merge.k_steps={2 * plan.batches.merge}"
    )
    return f"The same update in two parts needs less: {update}{'. So does precision=bf16' if _wide(plan) else ''}"


def _wide(plan: Plan) -> bool:
    """Whether 16 bits would be fewer than the numbers of the plan have."""
    return plan.chosen.precision in ("fp32", "fp64")


def _less(plan: Plan) -> str:
    return f"{'precision=bf16 or ' if _wide(plan) else ''}a smaller model needs less"
