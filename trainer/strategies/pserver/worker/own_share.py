"""A pserver worker's own share of a checkpoint, and its vectors in another order of the elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.strategies.pserver.worker.remote_model import DenseMap

Places = Sequence[Sequence[tuple[str, int, int]]]
"""For each server, the pieces of its vector: (name, start, stop)."""


@dataclass(frozen=True)
class Own:
    """A worker's own share of a checkpoint; empty if a strategy with the optimizer in the workers wrote it.

    Attributes:
        rank, workers, servers: the worker, and the numbers of workers and servers. steps: done by the worker, done
        before it, and the time of the last event. work: batches computed and not pushed. feedback: rounding errors of
        pushes. ahead: rows of the next batch. mode: state of the mode. places: order of the elements in the servers'
        vectors; empty: the present order.
    """

    rank: int = -1
    workers: int = 0
    servers: int = 0
    steps: tuple[int, int, int] | None = None
    work: Mapping[str, Any] = field(default_factory=dict)
    feedback: Sequence[Mapping[int, torch.Tensor]] = ()
    ahead: Mapping[str, Any] = field(default_factory=dict)
    mode: Mapping[str, Any] = field(default_factory=dict)
    places: Places = ()


def feedback_in_order(
    dense: DenseMap, places: Places, feedback: Sequence[Mapping[int, torch.Tensor]]
) -> Sequence[Mapping[int, torch.Tensor]]:
    """The rounding errors of pushes, by server, in this run's order of the elements.

    Args:
        places: the order in the checkpoint; empty: the same.
    """
    if not places or not any(feedback):
        return feedback
    sizes = [sum(stop - start for _, start, stop in own) for own in places]
    errors = [own.get(0, torch.zeros(n, dtype=dense.dtype)) for own, n in zip(feedback, sizes, strict=True)]
    return [{0: vector} for vector in dense.rearranged(places, errors)]
