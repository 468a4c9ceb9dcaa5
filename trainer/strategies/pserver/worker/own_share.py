"""What a checkpoint has of a parameter-server worker alone, and how its vectors are put in another order of the
elements."""

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
    """A worker's own share in a checkpoint; empty if it was written by a strategy whose workers have the optimizer.

    Attributes:
        rank, workers, servers: whose it is, of how many, and how many servers there are. steps: done by the worker,
        done before it, and the time of the last event. work: computed and not pushed. feedback: of what was pushed.
        ahead: the next batch's rows. mode: what the mode adds. places: the order of the elements in servers' vectors;
        none: of an older trainer, as now.
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
        places: of the elements before; none: the order is the same.
    """
    if not places or not any(feedback):
        return feedback
    sizes = [sum(stop - start for _, start, stop in own) for own in places]
    errors = [own.get(0, torch.zeros(n, dtype=dense.dtype)) for own, n in zip(feedback, sizes, strict=True)]
    return [{0: vector} for vector in dense.rearranged(places, errors)]
