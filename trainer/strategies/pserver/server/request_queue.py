"""Requests in turn: each is answered at once, refused, or waits and is tried again whenever something has changed."""

# States of a request: new -> waiting -> answered, or new -> answered.
# Who moves it: `take` tries a new request, then all that wait, in the order in which they came, until none can be
# answered any more. `try_again` does so when a note, a loss or the end of a write may have freed one. `end_overdue`
# fails the ones that have waited too long. `drop` fails those of a life that is over, `fail_all` all of them.
#
# What must always hold:
# - A request leaves the list before or while it is answered, so it is answered once, also where answering one request
#   answers or ends others.
# - A copy of a waiting request replaces its address and does not wait a second time. HELLO is the exception: a new life
#   counts its requests from 1 again.
# - A request that no handler can take is answered FAILED and counted as refused; the server goes on.

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trainer.errors import UserError
from trainer.host.notes_board import NoNote
from trainer.strategies.pserver.protocol.messages import SAVE_S, SAVE_TURN_S, SAVES, Malformed, Message, Verb, within
from trainer.strategies.pserver.server.answers import NONSENSE, NotYet, failed, not_arrived
from trainer.strategies.pserver.server.members import workers

MOST_WAITING = 100
"""Requests of one worker that may wait here; no client has so many under way."""


class Outlet(Protocol):
    """Where a server's answers go; a protocol, so that simulated servers have no socket."""

    def answer(self, address: bytes, request: Message, answer: Message) -> None:
        """Send the answer to a request."""

    def refuse(self, why: BaseException) -> None:
        """Count a malformed message."""

    def room(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised vector (count,) of values that will be sent."""

    def room_for_files(self) -> AbstractContextManager[object]:
        """While it lasts, descriptors are free for files, however many strangers hold connections."""

    def counts(self) -> dict[str, Any]:
        """The outlet's counts for the server's statistics."""


@dataclass(eq=False, slots=True)
class WaitingRequest:
    """A request that waits: since when, and the address for its answer."""

    address: bytes
    request: Message
    since: float

    def is_of(self, rank: int) -> bool:
        """Whether that worker sent this request."""
        return self.request.rank == rank


class RequestQueue:
    """The requests of one server, those that are new and those that wait.

    Args:
        outlet: where answers go. answer: does what a request asks for; raises NotYet where it has to wait. server:
        which one this is, for messages. patience_s: how long a request may wait. A SAVE has a limit of its own, and who
        waits for a worker that saves has more of it. now: the clock.
    """

    def __init__(
        self,
        outlet: Outlet,
        answer: Callable[[Message], Message],
        server: int,
        patience_s: float,
        now: Callable[[], float],
    ) -> None:
        self.outlet, self.answer, self.server, self.patience_s, self.now = outlet, answer, server, patience_s, now
        self.waiting: list[WaitingRequest] = []
        self.checked_at = now()

    def take(self, address: bytes, request: Message) -> None:
        """Try a new request, then all those that wait. A copy of one that waits joins it."""
        for known in self.waiting if request.verb != Verb.HELLO else ():  # a new life counts its requests from 1 again
            if known.is_of(request.rank) and known.request.number == request.number:
                known.address = address
                return
        self._try(WaitingRequest(address, request, self.now()))
        self.try_again()

    def try_again(self) -> None:
        """Try all waiting requests in the order in which they came; answering one may free another, or end others."""
        moved = bool(self.waiting)
        while moved:
            moved = False
            for waiting in list(self.waiting):
                if waiting in self.waiting and self._try(waiting):
                    moved = True
                    if waiting in self.waiting:
                        self.waiting.remove(waiting)

    def _try(self, waiting: WaitingRequest) -> bool:
        """Answer a request if it can be answered now; else it stays in the list."""
        request = waiting.request
        try:
            answer = self.answer(request)
        except NotYet:
            if waiting in self.waiting:
                return False
            if sum(w.is_of(request.rank) for w in self.waiting) < MOST_WAITING:
                self.waiting.append(waiting)
                return False
            answer = self._refused(request, Malformed(f"{MOST_WAITING} of its requests wait already"))
        except NoNote:  # the board is gone, and not for what this worker asks: it ends the server
            raise
        except NONSENSE as error:
            answer = self._refused(request, error)
        except UserError as error:
            answer = failed(str(error))
        self.outlet.answer(waiting.address, request, answer)
        return True

    def _refused(self, request: Message, error: BaseException) -> Message:
        self.outlet.refuse(error)
        why = str(error) if isinstance(error, (Malformed, ValueError)) else repr(error)
        return failed(f"server {self.server} refused {request.verb.name} of worker {request.rank}: {why}")

    def waits(self, request: Message) -> bool:
        """Whether this very message is among the waiting requests."""
        return any(w.request is request for w in self.waiting)

    def drop(self, rank: int, why: str, besides: Message | None = None) -> None:
        """Drop the waiting requests of a worker's life that is over, besides the HELLO of the next one."""
        for waiting in [w for w in self.waiting if w.is_of(rank) and w.request is not besides]:
            self.waiting.remove(waiting)
            self.outlet.answer(waiting.address, waiting.request, failed(why, fenced=True))

    def fail_all(self, rank: int, why: str) -> None:
        """Fail all waiting requests: that worker is lost, and nothing can be answered any more."""
        for waiting in self.waiting:
            self.outlet.answer(waiting.address, waiting.request, failed(why, over=True, missing=[rank]))
        self.waiting.clear()

    def away(self, seconds: float) -> None:
        """Add the seconds in which the server was busy or stopped; do not count them as waiting of a request."""
        for waiting in self.waiting:
            waiting.since += seconds

    def end_overdue(self) -> None:
        """Fail each request that has waited too long; the error names the workers that it waited for."""
        now = self.now()
        self._spare_who_stands(now)
        for waiting in [w for w in self.waiting if now - w.since > self._patience_with(w.request)]:
            if waiting not in self.waiting:  # the last answer to another one has ended it
                continue
            self.waiting.remove(waiting)
            self.outlet.answer(waiting.address, waiting.request, self._last_answer(waiting.request))

    def _spare_who_stands(self, now: float) -> None:
        """Do not count time in which all workers stand still for a checkpoint as waiting of requests for another
        meeting."""
        passed, self.checked_at = now - self.checked_at, now
        standing = {w.request.rank for w in self.waiting if _saves(w.request)}
        for waiting in self.waiting:
            if waiting.request.rank in standing and not _saves(waiting.request):
                waiting.since = min(now, waiting.since + passed)

    def _patience_with(self, request: Message) -> float:
        if request.verb == Verb.SAVE:
            return SAVE_TURN_S
        return self.patience_s + SAVE_S if _saves(request) else self.patience_s

    def _last_answer(self, request: Message) -> Message:
        try:
            return self.answer(request)
        except NoNote:
            raise
        except NONSENSE as error:
            return failed(repr(error))
        except NotYet as missing:
            names = workers(missing.ranks) or f"server {self.server}"
            limit = within(self._patience_with(request), 0.0 if request.verb == Verb.SAVE else self.patience_s)
            return failed(not_arrived(names, missing.what, limit), missing=missing.ranks)


def _saves(request: Message) -> bool:
    """Whether it waits for what the servers save."""
    return request.verb == Verb.SAVE or (request.verb == Verb.MEET and bool(request.flags & SAVES))
