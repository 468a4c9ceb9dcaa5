"""Strategies whose workers train replicas: another number of workers resumes from the mean of the replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class HasReplicas(Protocol):
    """Protocol of a strategy with a replica of the model in each worker (``Traits.replicas``)."""

    def weights(self, own: Sequence[Mapping[str, Any]]) -> list[float]:
        """The weight of each replica in the mean (their sum is 1), from the workers' own shares of a checkpoint."""

    def averaged(self, own: Mapping[str, Any]) -> Mapping[str, Any]:
        """The own share of a worker that starts from the mean, made of the first replica's."""


def add(total: Any, node: Any, weight: float) -> Any:
    """Add a replica's nested state, times its weight, to the sum so far (None: it is the first).

    Floating tensors with a dimension are added up as float64. All else (counts, settings, tensors without a dimension) is as in
    the first replica that has it.
    """
    if isinstance(node, torch.Tensor) and node.is_floating_point() and node.dim():
        part = node.double() * weight
        return part if total is None else total + part
    if isinstance(node, Mapping):
        before = {} if total is None else total
        return {**before, **{key: add(before.get(key), value, weight) for key, value in node.items()}}
    if isinstance(node, (list, tuple)):
        before = [] if total is None else total
        return [add(before[n] if n < len(before) else None, value, weight) for n, value in enumerate(node)]
    return node if total is None else total


def like(total: Any, node: Any) -> Any:
    """Convert a sum's numbers to the types of a replica's state."""
    if isinstance(total, torch.Tensor):
        return total.to(node.dtype) if isinstance(node, torch.Tensor) else total
    if isinstance(total, Mapping):
        known = node if isinstance(node, Mapping) else {}
        return {key: like(value, known.get(key)) for key, value in total.items()}
    if isinstance(total, list):
        items = list(node) if isinstance(node, (list, tuple)) else []
        made = [like(value, items[n] if n < len(items) else None) for n, value in enumerate(total)]
        return tuple(made) if isinstance(node, tuple) else made
    return total
