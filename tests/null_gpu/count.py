"""``python -m tests.null_gpu.count``: trains on a null GPU, and prints its waits and kernels as JSON.

The question is ``{"workers": N, "overrides": [...], "config_dir": PATH or null}``. The answer has for each phase how
often it came, its waits, each ``[kind, line, count]``, and its kernels: ``start`` (the first update), ``update`` (ten
further ones), ``line``, ``checkpoint`` (with the wait for the line before it), ``validation``, ``validation of the
average``, ``best model``, ``after a validation`` (plateau, early stop, callbacks).
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from tests.composed import ready
from tests.null_gpu import fakes
from tests.null_gpu.machine import leave
from tests.null_gpu.waits import Waits
from tests.pictures import silent
from trainer.checkpoint.pinned import PinnedMemory
from trainer.checkpoint.tensor_tree import Packed
from trainer.config.instantiate import locate
from trainer.host import hardware
from trainer.host.notes_board import SealedBoard
from trainer.host.visible_gpus import Gpu
from trainer.run_folder.report import Report
from trainer.strategies.contract import HoldsShards
from trainer.strategies.seat import Seat
from trainer.worker import build, loop, validation
from trainer.worker import model as model_file
from trainer.worker.nonfinite import check_parameters
from trainer.worker.settings import settings
from trainer.worker.state import save_state
from trainer.worker.train import seated
from trainer.worker.training import Training
from trainer.worker.training_log import read_line

UPDATES = 10
GPU = Gpu("NVIDIA H100 80GB HBM3", (9, 0))


class Phases:
    """Counts how often each phase came, and names the present one for the counter of waits."""

    def __init__(self, waits: Waits) -> None:
        self.waits, self.times = waits, dict[str, int]()

    @contextlib.contextmanager
    def phase(self, name: str, times: int = 1) -> Iterator[None]:
        """Context manager: what happens belongs to this phase."""
        before, self.waits.phase = self.waits.phase, name
        self.times[name] = self.times.get(name, 0) + times
        try:
            yield
        finally:
            self.waits.phase = before

    def around(self, name: str, call: Any) -> Any:
        """The function, as a phase of its own."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return call(*args, **kwargs)

        return counted


def count(workers: int, overrides: list[str], config_dir: str | None = None) -> dict[str, Any]:
    """Train some updates with a plan for so many GPUs, of which this process has the first."""
    folder = Path(tempfile.mkdtemp())
    with patch.object(hardware, "gpus", lambda: (GPU,) * workers):
        typed = [*overrides, "device=cuda", "execution.expandable_segments=false", "tracking=none"]
        job = ready(*typed, run_dir=str(folder), config_dir=config_dir)
    job.checked.source.prepare(job.checked.facts, silent)
    config, plan = job.assignment.config, job.assignment.plan
    board = SealedBoard(dist.HashStore(), b"x" * 32)
    seat = Seat("worker", 0, workers, 0, workers, "cuda:0", board, group_store=dist.HashStore())
    seat = seated(seat, config, plan)
    waits = Waits()
    phases = Phases(waits)
    with contextlib.ExitStack() as stack:
        stack.enter_context(fakes.in_place(workers, waits))
        stack.enter_context(patch.object(loop, "log_training", phases.around("line", loop.log_training)))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(waits)
        stack.enter_context(settings(config, plan, seat))
        strategy = locate(plan.strategy.worker)(config.node("strategy"), seat)
        run = build.build(config, plan, seat, strategy, Report(folder, plan.length.total_steps))
        updates = run.feed.updates
        for phase, times in (("start", 1), ("update", UPDATES)):
            run.feed.updates = lambda epoch, first, times=times: islice(updates(epoch, first), times)
            with phases.phase(phase, times):
                loop.train_epoch(run, 0)
        _end(run, phases, folder)
    return {
        "device": torch.cuda.get_device_name(0),
        "precision": plan.chosen.precision,
        "phases": {
            name: {
                "times": times,
                "waits": [[kind, where, n] for (p, kind, where), n in waits.found.items() if p == name],
                "kernels": sum(n for (p, _), n in waits.kernels.items() if p == name),
                "lines": {where: n for (p, where), n in waits.kernels.most_common() if p == name},
            }
            for name, times in phases.times.items()
        },
    }


def _end(run: Training, phases: Phases, folder: Path) -> None:
    """What comes beside the updates: the copy for a checkpoint, and a validation."""
    with phases.phase("checkpoint"):
        read_line(run)
        check_parameters(run)
        Packed(vars(save_state(run, run.strategy.save(folder), 0, True)), PinnedMemory())
    run.watchers.checkpoints = Leavable()
    run.watchers.save_best = phases.around("best model", lambda first: _copy_model(run))
    with (
        patch.object(validation, "_measure_ema", phases.around("validation of the average", validation._measure_ema)),
        patch.object(validation, "_pass_on", phases.around("after a validation", validation._pass_on)),
        patch.object(validation, "poll_callbacks", phases.around("after a validation", validation.poll_callbacks)),
        phases.phase("validation"),
    ):
        validation.validate(run)


def _copy_model(run: Training) -> None:
    """The copy for the file of the best model."""
    model = run.model
    if isinstance(run.strategy, HoldsShards):
        run.strategy.gathered(model.state_dict())
        return
    with patch.object(model_file, "_with_storage", lambda copy: copy):
        model_file.OnHost(model, PinnedMemory())


class Leavable:
    """What a validation asks of checkpoints. No worker leaves it."""

    def validating(self, run: Training) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def breaks_off(self, run: Training) -> bool:
        return False

    def after_share(self, run: Training) -> torch.Tensor:
        with _disable_current_modes():  # it has a value
            return torch.zeros(1, dtype=torch.float64)

    def after_shares(self, run: Training, cut: torch.Tensor) -> None:
        assert cut.device.type == "cpu", "which does not wait"


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):
        answer = count(**json.loads(sys.argv[1]))
    leave(answer)
