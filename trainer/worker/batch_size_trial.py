"""One worker of a trial for data.batch_size=auto: runs some updates and a validation batch within a memory limit."""

from __future__ import annotations

import contextlib
import json
import os
import resource
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer.errors import RunFailed, first_line
from trainer.host import json_text, memory
from trainer.host.files import replace_file
from trainer.host.memory import GIB
from trainer.planning.launcher import Assignment
from trainer.strategies.seat import Seat
from trainer.worker.loop import fit
from trainer.worker.out_of_memory import EVALUATING, is_memory
from trainer.worker.train import at_work

UPDATES = 2
"""The first makes the optimizer's state, and the second has it beside the gradients and the activations."""
TRIAL, TOO_LARGE = "trial.json", "too_large.{}"
"""Files in the trial's folder: the limits for its workers, and why a worker's memory was not enough."""
THREAD = 16 << 20
"""Bytes of memory that a thread asks for at most, and hardly uses."""


PROBABLY = ("the peak was", "CUDNN_STATUS_NOT_SUPPORTED", "could not create a primitive", "signal: Killed")
"""What a trial ends with where memory is not enough, though another reason could be behind it in a run."""


@dataclass(frozen=True)
class TrialLimits:
    """The memory limits of a trial's workers.

    Attributes:
        limit: bytes that all processes of the run may use on this host, or on a GPU; None: what is free.
        free: of this host's memory, when the trial began.
        others: the launcher and the processes that it had before the trial.
        here: processes of the run on this host, among which the memory is divided.
    """

    limit: int | None
    free: int
    others: list[int]
    here: int

    def leave(self, folder: Path) -> None:
        """Write the limits into the trial's folder, for the workers."""
        (folder / TRIAL).write_text(json.dumps(asdict(self)))


class Needed(NamedTuple):
    """Bytes that a worker needed at its peak, and may need; on a CPU without those of an empty process."""

    peak: int
    most: int


def trial(seat: Seat, assignment: Assignment) -> dict[str, Any]:
    """Run some updates and a validation batch as the run would; returns how much memory they needed.

    Returns:
        ``needed``: what this worker needed, see :class:`Needed`.

    Raises:
        RunFailed: memory was not enough; the folder then holds a file that says so.
    """
    folder = Path(assignment.plan.paths.run_dir)
    limits = TrialLimits(**json_text.read(folder / TRIAL))
    try:
        measure = _limited_gpu(limits, seat.device) if seat.device.startswith("cuda") else _limited_host(limits)
        with at_work(seat, assignment) as run:
            run.schedule = replace(run.schedule, total_steps=UPDATES, epochs=max(UPDATES, run.schedule.epochs))
            run.watchers.save_best = lambda first: None
            fit(run)
            needed = measure()
        if needed.peak > needed.most:
            raise RunFailed(f"the peak was {needed.peak / GIB:.2f} GiB, of {needed.most / GIB:.2f} GiB")
    except (RunFailed, MemoryError, RuntimeError) as error:
        if is_memory(error) or is_memory(error.__cause__) or any(said in str(error) for said in PROBABLY):
            replace_file(folder / TOO_LARGE.format(seat.rank), _briefly(error))
        raise
    return {"needed": tuple(needed)}


def _briefly(error: BaseException) -> str:
    """Why a tried batch size does not fit: the first words of the memory error."""
    cause = error.__cause__ if is_memory(error.__cause__) else error
    words = first_line(cause or error).partition(". GPU")[0]
    return f"{EVALUATING}: {words}" if EVALUATING in str(error) else words  # then data.val_batch_size matters


Measure = Callable[[], Needed]


def _limited_gpu(limits: TrialLimits, device: str) -> Measure:
    """Limit this process's GPU memory; returns a function that measures the memory used."""
    there = torch.cuda.mem_get_info(device)[1]
    most = min(limits.limit or there, there)
    if limits.limit is not None:
        torch.cuda.set_per_process_memory_fraction(most / there, device)
    return lambda: Needed(torch.cuda.max_memory_reserved(device), most)


def _limited_host(limits: TrialLimits) -> Measure:
    """Limit this worker's host memory to about its share; returns a function that measures the memory used. If the
    host's memory runs out nevertheless, the kernel ends this process first.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    room = limits.free * 9 // 10
    if limits.limit is not None:
        room = limits.limit - memory.held_by({*limits.others, os.getppid()})
    most, empty = max(0, room // limits.here), memory.own("VmRSS")
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    wanted = memory.own("VmData") + most + THREAD * (8 + (os.cpu_count() or 1))
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    return lambda: Needed(memory.own("VmHWM") - empty + memory.of_children(), most)
