"""What a worker's client needs of the outside world: connections to all servers, and a clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from trainer.strategies.pserver.protocol.messages import Message

ROOM_S = 0.1
"""A message for which there is no room is tried again after so long."""


class Connections(Protocol):
    """Protocol of a worker's connections to all servers, and its clock.
    A message may be lost, come twice, late, or after later ones."""

    count: int
    """Servers."""
    far: bool
    """Servers may be on hosts whose launchers cannot tell that they have ended."""

    def now(self) -> float:
        """The time on the worker's clock, in seconds."""

    def room(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised vector (count,) for values to send, in memory from which sending is cheapest."""

    def send(self, server: int, frames: Sequence[Any]) -> bool:
        """Send a packed message to one server, without waiting; its buffers must not change before it is answered.
        False: there is no room for it now, and it does not go."""

    def receive(self) -> list[Message]:
        """Return the answers that have arrived from all servers."""

    def saving(self, servers: Iterable[int]) -> set[int]:
        """Those of these servers that report that they write their part of a checkpoint, and answer nobody
        meanwhile."""

    def wait(self, seconds: float) -> None:
        """Wait until an answer has arrived, at most ``seconds``."""

    def sleep(self, seconds: float) -> None:
        """Sleep for ``seconds``, whatever arrives."""

    def close(self) -> None:
        """Close the connections to all servers."""
