"""A worker's request to one server, and what it fails with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.errors import Missing, RunFailed
from trainer.strategies.pserver.protocol.messages import Message


class Fenced(RunFailed):
    """Raised when this worker was declared lost, or was restarted elsewhere; the others go on without it."""

    ends_run = False


class Over(Missing):
    """Raised when a server cannot go on because another worker is lost."""

    follows = True


@dataclass(slots=True)
class Request:
    """A request of this worker to one server, and its answer once it is there. ``settles``: what it fails with is told
    to who waits for it alone."""

    server: int
    message: Message
    frames: list[Any]
    sent: float
    again: float
    then: Callable[[Message], None] | None = None
    every: float = 0.0
    answer: Message | None = None
    failure: RunFailed | None = None
    settles: bool = False


def failure_of(body: Mapping[str, Any]) -> RunFailed:
    """The error of a request to which a server has answered FAILED."""
    why = str(body["why"])
    if body.get("fenced"):
        return Fenced(why)
    who = [f"worker {rank}" for rank in body.get("missing", ())]
    if body.get("over"):
        return Over(why, who)
    return Missing(why, who) if who else RunFailed(why)
