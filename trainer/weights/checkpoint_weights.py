"""Reads the weights in a checkpoint, as the validation after that update saw them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import store, tensor_tree
from trainer.errors import UserError
from trainer.weights import server_files

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class WorkerWeights:
    """The weights in a worker's part of a checkpoint.

    Attributes:
        model: parameters by name; ema: their moving average, buffers last. None: as in the first worker's part.
        buffers: of this worker; own: state that the strategy keeps for this worker only.
    """

    model: Tensors | None
    buffers: Tensors
    ema: Mapping[str, Any] | None
    own: Mapping[str, Any]


def read(folder: Path, averaged: bool = False) -> Tensors:
    """Read a checkpoint's weights: parameters and buffers by name, including those that a state_dict leaves out.

    Where each worker has parameters of its own (``local_sgd``), these are their mean, weighted by the samples behind
    each; those that parameter servers keep are theirs.

    Args:
        averaged: the moving average of the weights instead.

    Raises:
        UserError: they cannot be read, or no average was kept.
    """
    about = store.about(folder)
    paths = [
        path for worker in range(about.workers) if (path := folder / store.part_of(worker)).is_file()
    ]  # others were lost
    if not paths:
        raise UserError(str(folder), "it has no part of a worker", "another checkpoint")
    parts = [_part(path) for path in paths]
    if averaged:
        return _averaged(folder, parts)
    models = [part.model for part in parts if part.model is not None]
    if not models:
        raise UserError(str(paths[0]), "it holds no parameters", "another checkpoint")
    shares = _shares(parts)
    model = {name: _mean([one[name] for one in models], shares) for name in models[0]}
    if about.servers:
        model = server_files.parameters(folder, model)
    first, everybody = parts[0].buffers, about.config.get("strategy", {}).get("buffers") == "average"
    alike = [1 / len(parts)] * len(parts)
    buffers = {
        name: _mean([part.buffers[name] for part in parts], alike)
        if everybody and tensor.is_floating_point()
        else tensor
        for name, tensor in first.items()
    }
    return {**model, **buffers}


def _part(path: Path) -> WorkerWeights:
    try:
        return WorkerWeights(**tensor_tree.read(path, [*WorkerWeights.__dataclass_fields__]))
    except TypeError as error:
        raise UserError(str(path), "it is no worker's part of a checkpoint") from error


def _averaged(folder: Path, parts: Sequence[WorkerWeights]) -> Tensors:
    first = parts[0]
    kept = [list(part.ema.get("average", ())) for part in parts if part.ema is not None]
    names = [*(first.model or ()), *first.buffers]
    if not kept or any(len(average) != len(names) for average in kept):
        raise UserError(str(folder), "no average of the weights was kept (ema.decay=null)", "the weights themselves")
    share = [1 / len(kept)] * len(kept)
    count = len(first.model or ())
    return {
        name: _mean([average[place] for average in kept], share) if place < count else kept[0][place]
        for place, name in enumerate(names)
    }


def _shares(parts: Sequence[WorkerWeights]) -> list[float]:
    """The weight of each worker's parameters in their mean."""
    samples = [float(part.own.get("samples", 0)) for part in parts]
    total = sum(samples)
    return [one / total for one in samples] if total else [1 / len(parts)] * len(parts)


def _mean(tensors: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    first = tensors[0]
    if all(torch.equal(first, other) for other in tensors[1:]):
        return first
    total = torch.zeros_like(first)
    for tensor, share in zip(tensors, shares, strict=True):
        total += tensor * share
    return total
