"""Collects all of a worker's state that the rest of its run depends on, as nested plain data, and restores it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.checkpoint.tensor_tree import on_device
from trainer.errors import RunFailed
from trainer.host.sharded import put
from trainer.strategies.contract import SavesPieces, Share
from trainer.worker.training import Training


@dataclass
class WorkerState:
    """A worker's part of a checkpoint: everything that the rest of its run depends on.

    Attributes:
        progress: position of the run, see :class:`Progress`.
        model: parameters by name. ema: their average. strategy: state that all workers have alike. None: the first
        worker's part has them.
        buffers, averaged_buffers: the worker's own buffers, and their average. own: the strategy's own state.
        window, batches: the log window, and its batches.
        randomness: states of the random generators.
        report, early_stop, callbacks: their states.
    """

    progress: Mapping[str, Any]
    model: Mapping[str, torch.Tensor] | None
    ema: Mapping[str, Any] | None
    strategy: Mapping[str, Any] | None
    buffers: Mapping[str, torch.Tensor]
    averaged_buffers: Sequence[torch.Tensor]
    own: Mapping[str, Any]
    window: Mapping[str, Any]
    batches: Sequence[Any]
    randomness: Mapping[str, Any]
    report: Mapping[str, Any]
    early_stop: Mapping[str, Any] | None
    callbacks: Mapping[str, Any]


def save_state(run: Training, share: Share, epoch: int, whole: bool) -> WorkerState:
    """Return a worker's part of a checkpoint. Its tensors are those of the training: copy them at once.

    Args:
        share: the strategy's state.
        epoch: epoch in which the run goes on: the current one, or the next one from its start.
        whole: include what all workers have alike.
    """
    progress, ema, early_stop, callbacks = (
        run.progress,
        run.watchers.ema,
        run.watchers.early_stop,
        run.watchers.callbacks,
    )
    alike = common_state(run, share) if whole else {"model": None, "ema": None, "strategy": None}
    next_epoch = {} if epoch == progress.epoch else {"epoch": epoch, "update": 0}
    return WorkerState(
        progress={**vars(progress), **next_epoch},
        **alike,
        buffers=dict(run.model.named_buffers()),
        averaged_buffers=[] if ema is None else ema.average[ema.buffers :],
        own=share.own,
        window=run.reporting.window.state(),
        batches=run.reporting.window.meter.state(),
        randomness=randomness(device_of(run)),
        report=run.reporting.report.state(),
        early_stop=None if early_stop is None else early_stop.state(),
        callbacks=callbacks.state() if callbacks else {},
    )


def common_state(run: Training, share: Share) -> dict[str, Any]:
    """What all workers have alike, or hold in shards: ``model``, ``ema`` and ``strategy`` of :class:`WorkerState`."""
    average = run.watchers.ema
    alike = {
        "model": {name: p.detach() for name, p in run.model.named_parameters()},
        "ema": None if average is None else average.state(),
        "strategy": share.common,
    }
    return run.strategy.pieces(alike) if isinstance(run.strategy, SavesPieces) else alike


def load_state(run: Training, folder: Path, part: WorkerState, first: WorkerState) -> None:
    """Put the state that :func:`save_state` returned back into a worker.

    Args:
        folder: the checkpoint.
        part: state of this worker. first: state of the first worker, which has what all workers have alike.
    """
    ema, early_stop, callbacks, report = (
        run.watchers.ema,
        run.watchers.early_stop,
        run.watchers.callbacks,
        run.reporting.report,
    )
    vars(run.progress).update(part.progress)
    whole = first if part.model is None else part
    assert whole.model is not None and whole.strategy is not None
    _put(dict(run.model.named_parameters()), whole.model)
    _put(dict(run.model.named_buffers()), part.buffers)
    run.strategy.load(folder, Share(whole.strategy, part.own))
    if ema is not None and whole.ema is not None:
        ema.load(**whole.ema)
        names = [*ema.names[: ema.buffers], *part.buffers]
        ema.load(ema.step, [*ema.average[: ema.buffers], *part.averaged_buffers], names)
    elif ema is not None:  # it was made of the model's first weights
        ema.begin_anew()
    if early_stop is not None and part.early_stop is not None:
        early_stop.load(**part.early_stop)
    if callbacks:
        callbacks.load(part.callbacks)
    report.load(**part.report)
    run.feed.waited = report.data_waited
    run.reporting.window.load(part.window)
    run.reporting.window.meter.load(on_device(part.batches, device_of(run)))
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
        put(tensor, saved[name])


class BeforeValidation:
    """The state before a validation, of everything that a validation changes. A run that is asked to leave in a
    validation saves this state, and its next life repeats the validation.

    The state is that of the random generators and, with several workers, the model's buffers, on which the workers have
    not agreed yet. Nothing else changes before the validation is done, or the change is the same when it is made twice:
    workers agree on equal parameters, and on averaged weights, whose mean is computed in float64.
    """

    def __init__(self, run: Training, alone: bool) -> None:
        self.randomness = randomness(device_of(run))
        self.buffers = [] if alone else [buffer.detach().clone() for buffer in run.model.buffers()]

    @contextmanager
    def restored(self, run: Training) -> Iterator[None]:
        """Context manager: the worker has its state before the validation, to be saved."""
        put_randomness(device_of(run), **self.randomness)
        with _own_weights(run):
            with torch.no_grad():
                for buffer, before in zip(run.model.buffers(), self.buffers, strict=False):
                    buffer.copy_(before)
            yield


@contextmanager
def _own_weights(run: Training) -> Iterator[None]:
    """Context manager: the model has its own weights, not the averaged or best ones that are being measured."""
    run.final_test.restore_trained(run.model)
    if run.watchers.ema is not None and run.watchers.ema.placed:
        with run.watchers.ema.in_place():  # exchanges the weights once more
            yield
    else:
        yield
