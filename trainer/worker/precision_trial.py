"""Measures on the first worker's GPU how fast a model trains in each precision, for ``precision=auto``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.host import json_text
from trainer.planning.launcher import Assignment
from trainer.strategies.seat import Seat
from trainer.worker.model import autocast, construct, prepared
from trainer.worker.out_of_memory import is_memory

TRIAL = "precisions.json"
"""File in the trial's folder: the precisions to compare."""
MEASURED_S = 2.0
"""Seconds of all timed steps together."""
UNTIMED = 2
"""Steps before the first that is timed: they choose kernels and fill the cache of memory."""
BETWEEN_WAITS = 4
"""Steps between two waits for the GPU."""


def trial(seat: Seat, assignment: Assignment) -> dict[str, Any]:
    """Measure the precisions that the folder's file names.

    Returns:
        ``speeds``: samples per second by precision.
    """
    config, plan, device = assignment.config, assignment.plan, torch.device(seat.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    precisions: list[str] = json_text.read(Path(plan.paths.run_dir) / TRIAL)
    shape, size = plan.data.facts.shape, plan.batches.size
    assert not isinstance(shape, dict), "only models of one tensor are measured"
    speeds = {}
    for precision in precisions:
        of_it = plan.changed(
            chosen={"precision": precision, "channels_last": plan.chosen.channels_last and precision != "fp32"}
        )
        model = prepared(construct(config), config, of_it, device).train()
        step = step_of(model, shape, precision, device)
        speeds[precision] = rate(step, size, MEASURED_S / len(precisions), lambda: wait(device))
        del model, step
    return {"speeds": speeds}


def step_of(
    model: torch.nn.Module, shape: Sequence[int], precision: str, device: torch.device
) -> Callable[[int], None]:
    """Return a function that runs forward and backward of so many samples of noise."""
    context, batches = autocast(precision, device), dict[int, torch.Tensor]()

    def step(samples: int) -> None:
        if samples not in batches:
            batches.clear()
            noise = torch.rand((samples, *shape), device=device)
            last = precision != "fp32" and noise.dim() == 4
            batches[samples] = noise.contiguous(memory_format=torch.channels_last) if last else noise
        with context():
            loss = model(batches[samples]).float().mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    return step


def rate(
    step: Callable[[int], None],
    samples: int,
    seconds: float,
    synchronize: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Measure a step for so many seconds; returns samples per second.

    A batch that does not fit into memory is halved.
    """
    while True:
        try:
            for _ in range(UNTIMED):
                step(samples)
            synchronize()
            break
        except RuntimeError as error:
            if samples == 1 or not is_memory(error):
                raise
        samples //= 2
    began, done, now = clock(), 0, 0.0
    while not done or now < seconds:
        for _ in range(BETWEEN_WAITS):
            step(samples)
        synchronize()
        done, now = done + BETWEEN_WAITS, clock() - began
    return samples * done / max(now, 1e-9)


def wait(device: torch.device) -> None:
    """Wait until a device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
