"""The interface of a worker's client to the outside world: connections to all servers, and a clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from trainer.strategies.pserver.protocol.messages import Message

ROOM_S = 0.1
"""Wait before a message is sent again for which there was no room."""


class Connections(Protocol):
    """Protocol of a worker's connections to all servers, and its clock.
    A message may be lost, come twice, late, or after later ones."""

    count: int
    """Number of servers."""
    far: bool
    """Servers may be on other hosts, so that this host's launcher does not notice their end."""

    def now(self) -> float:
        """The time on the worker's clock, in seconds."""

    def room(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised vector (count,) for values to send, in memory from which sending is cheapest."""

    def send(self, server: int, frames: Sequence[Any]) -> bool:
        """Send a packed message to one server, without waiting; returns False if there is no room for it now.

        Its buffers must not change before it is answered.
        """

    def receive(self) -> list[Message]:
        """Return the answers that have arrived from all servers."""

    def saving(self, servers: Iterable[int]) -> set[int]:
        """Those of these servers that write their part of a checkpoint now, and answer no requests."""

    def wait(self, seconds: float) -> None:
        """Wait until an answer has arrived, at most ``seconds``."""

    def sleep(self, seconds: float) -> None:
        """Sleep for ``seconds``, whatever arrives."""

    def close(self) -> None:
        """Close the connections to all servers."""
