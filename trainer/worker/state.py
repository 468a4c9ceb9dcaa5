"""Collects all of a worker's state that the rest of its run depends on, as nested plain data, and restores it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.checkpoint.tensor_tree import on_device
from trainer.errors import RunFailed
from trainer.strategies.contract import Share
from trainer.worker.loop import Training

PROGRESS = ("update", "step", "samples", "validated", "examined", "skipped", "in_a_row", "rewinds", "closed")
"""How far the training is, besides the epoch. Older checkpoints lack the last of them."""
LINE = ("batches", "printed", "due", "lr", "number", "before", "epoch", "earlier")
"""Of the line of the log that is being averaged, besides its sums."""


@dataclass
class WorkerState:
    """A worker's part of a checkpoint: its whole state.

    Attributes:
        epoch: in which the run goes on; progress: how far it is. model: parameters by name; ema: their average;
        strategy: its common share. None: the first worker's part has them. buffers, averaged_buffers, own: the worker's
        own buffers, their average, the strategy's own share. line, seen: the line of the log that is being averaged,
        and the batches behind it. randomness: states of the generators. report, early_stop, callbacks: what they
        remember.
    """

    epoch: int
    progress: Mapping[str, Any]
    model: Mapping[str, torch.Tensor] | None
    ema: Mapping[str, Any] | None
    strategy: Mapping[str, Any] | None
    buffers: Mapping[str, torch.Tensor]
    averaged_buffers: Sequence[torch.Tensor]
    own: Mapping[str, Any]
    line: Mapping[str, Any]
    seen: Sequence[Any]
    randomness: Mapping[str, Any]
    report: Mapping[str, Any]
    early_stop: Mapping[str, Any] | None
    callbacks: Mapping[str, Any]


def part_of(run: Training, share: Share, epoch: int, whole: bool) -> WorkerState:
    """Collect a worker's part of a checkpoint. Its tensors are those of the training: copy them at once.

    Args:
        share: the strategy's.
        epoch: in which the run goes on, after ``run.update`` updates of it; of the next one after none.
        whole: with what all workers have alike.
    """
    ema = run.ema
    return WorkerState(
        epoch=epoch,
        progress={name: getattr(run, name) for name in PROGRESS} | ({} if epoch == run.epoch else {"update": 0}),
        model={name: p.detach() for name, p in run.model.named_parameters()} if whole else None,
        ema=ema.state() if whole and ema is not None else None,
        strategy=share.common if whole else None,
        buffers=dict(run.model.named_buffers()),
        averaged_buffers=[] if ema is None else ema.average[ema.buffers :],
        own=share.own,
        line={name: getattr(run.line, name) for name in LINE},
        seen=run.line.meter.state(),
        randomness=randomness(device_of(run)),
        report=run.report.state(),
        early_stop=None if run.early_stop is None else run.early_stop.state(),
        callbacks=run.callbacks.state() if run.callbacks else {},
    )


def go_on(run: Training, folder: Path, part: WorkerState, first: WorkerState) -> None:
    """Put the state that :func:`part_of` has collected back into a worker: model, optimizer, feed, log line, random
    numbers.

    Args:
        folder: of the checkpoint.
        part: the worker's; first: that of the first worker, which has what is common to all.
    """
    run.epoch = part.epoch
    for name in PROGRESS:
        setattr(run, name, part.progress.get(name, getattr(run, name)))
    whole = first if part.model is None else part
    assert whole.model is not None and whole.strategy is not None
    _put(dict(run.model.named_parameters()), whole.model)
    _put(dict(run.model.named_buffers()), part.buffers)
    run.strategy.load(folder, Share(whole.strategy, part.own))
    if run.ema is not None and whole.ema is not None:
        run.ema.load(**whole.ema)
        names = [*run.ema.names[: run.ema.buffers], *part.buffers]
        run.ema.load(run.ema.step, [*run.ema.average[: run.ema.buffers], *part.averaged_buffers], names)
    elif run.ema is not None:  # it was made of the model's first weights
        run.ema.begin_anew()
    if run.early_stop is not None and part.early_stop is not None:
        run.early_stop.load(**part.early_stop)
    if run.callbacks:
        run.callbacks.load(part.callbacks)
    run.report.load(**part.report)
    run.feed.waited = run.report.data_waited
    for name in LINE:
        setattr(run.line, name, part.line[name])
    run.line.meter.load(on_device(part.seen, device_of(run)))
    put_randomness(device_of(run), **part.randomness)


def device_of(run: Training) -> torch.device:
    """The device of a worker's state: that of its model."""
    return next((p.device for p in run.model.parameters()), torch.device("cpu"))


def randomness(device: torch.device) -> dict[str, Any]:
    """The states of this process's random generators."""
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def put_randomness(device: torch.device, cpu: torch.Tensor, cuda: torch.Tensor | None, numpy: Any, python: Any) -> None:
    """Set this process's random generators to the states that :func:`randomness` returned."""
    torch.set_rng_state(cpu)
    if device.type == "cuda" and cuda is not None:
        torch.cuda.set_rng_state(cuda, device)
    np.random.set_state(numpy)
    random.setstate(python)


@torch.no_grad()
def _put(live: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in live.items():
        if name not in saved or saved[name].shape != tensor.shape:
            there = "has no" if name not in saved else f"has {tuple(saved[name].shape)} for"
            raise RunFailed(f"the checkpoint is of another model: it {there} {name} {tuple(tensor.shape)}")
        tensor.copy_(saved[name])
