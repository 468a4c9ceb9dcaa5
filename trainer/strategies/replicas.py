"""Strategies whose workers train replicas: another number of workers resumes from the mean of the replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class HasReplicas(Protocol):
    """Protocol of a strategy with a replica of the model in each worker (``Traits.replicas``)."""

    def weights(self, own: Sequence[Mapping[str, Any]]) -> list[float]:
        """The weight of each replica in the mean (their sum is 1), from the workers' own shares of a checkpoint."""

    def averaged(self, own: Mapping[str, Any]) -> Mapping[str, Any]:
        """The own share of a worker that starts from the mean, made of the first replica's."""
