"""Protocol of strategies with replicas in their workers: another number of workers resumes from their mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class HasReplicas(Protocol):
    """Protocol of a strategy with a replica of the model in each worker (``Traits.replicas``)."""

    def weights(self, own: Sequence[Mapping[str, Any]]) -> list[float]:
        """The weight of each replica in the mean, from the own shares of a checkpoint; the weights sum to 1."""

    def averaged(self, own: Mapping[str, Any]) -> Mapping[str, Any]:
        """The own share of a worker that starts from the mean.

        Args:
            own: the own share of the first replica.
        """
