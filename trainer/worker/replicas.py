"""Converts a worker's part of a checkpoint to another number of workers, if each worker has its own replica."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trainer.checkpoint import store
from trainer.checkpoint.tensor_tree import read
from trainer.strategies.replicas import HasReplicas, add, like
from trainer.worker.state import WorkerState

OWN, AVERAGED = "own", ("model", "ema", "strategy")
"""Of a worker's part."""


def averaged(strategy: HasReplicas, folder: Path, first: WorkerState) -> WorkerState:
    """Return the first worker's part with the mean of all replicas' parameters, moving averages and optimizer states.

    One part after the other is read: two of them are in memory at a time.
    """
    names = store.parts(folder)
    own = [read(folder / name, [OWN])[OWN] for name in names]
    total = None
    for name, weight in zip(names, strategy.weights(own), strict=True):
        total = add(total, read(folder / name, AVERAGED), weight)
    mean = like(total, {name: getattr(first, name) for name in AVERAGED})
    return replace(first, **mean, own=strategy.averaged(own[0]))
