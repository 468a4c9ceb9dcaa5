"""Converts a worker's part of a checkpoint to another number of workers, if each worker has its own replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import store
from trainer.checkpoint.tensor_tree import read
from trainer.strategies.replicas import HasReplicas
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
        total = _add(total, read(folder / name, AVERAGED), weight)
    mean = _like(total, {name: getattr(first, name) for name in AVERAGED})
    return replace(first, **mean, own=strategy.averaged(own[0]))


def _add(total: Any, node: Any, weight: float) -> Any:
    """Add a replica's nested state, times its weight, to the sum so far (None: it is the first).

    Floating tensors with a dimension are added up as float64. All else (counts, settings, tensors without a dimension) is as in
    the first replica that has it.
    """
    if isinstance(node, torch.Tensor) and node.is_floating_point() and node.dim():
        part = node.double() * weight
        return part if total is None else total + part
    if isinstance(node, Mapping):
        before = {} if total is None else total
        return {**before, **{key: _add(before.get(key), value, weight) for key, value in node.items()}}
    if isinstance(node, (list, tuple)):
        before = [] if total is None else total
        return [_add(before[n] if n < len(before) else None, value, weight) for n, value in enumerate(node)]
    return node if total is None else total


def _like(total: Any, node: Any) -> Any:
    """Convert a sum's numbers to the types of a replica's state."""
    if isinstance(total, torch.Tensor):
        return total.to(node.dtype) if isinstance(node, torch.Tensor) else total
    if isinstance(total, Mapping):
        known = node if isinstance(node, Mapping) else {}
        return {key: _like(value, known.get(key)) for key, value in total.items()}
    if isinstance(total, list):
        items = list(node) if isinstance(node, (list, tuple)) else []
        made = [_like(value, items[n] if n < len(items) else None) for n, value in enumerate(total)]
        return tuple(made) if isinstance(node, tuple) else made
    return total
