"""Answers of a handler that has no result: a failure, or a request that has to wait."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.strategies.pserver.protocol.messages import Malformed, Message, Verb, text

NONSENSE = (Malformed, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, OSError)
"""Errors of a request with nonsense in it, and of a full disk. The sender gets the error; the server goes on."""


class NotYet(Exception):
    """Raised by a handler whose request has to wait: for whom, at what."""

    def __init__(self, ranks: list[int], what: str) -> None:
        super().__init__(what)
        self.ranks, self.what = ranks, what


def failed(why: str, fenced: bool = False, over: bool = False, missing: Iterable[int] = ()) -> Message:
    """The answer to a request that fails. ``fenced``: its worker does not take part any more. ``over``: the server
    cannot go on without another worker. ``missing``: the workers that the request has waited for."""
    body = {"why": why, "fenced": fenced, "over": over, "missing": sorted(missing)}
    return Message(Verb.FAILED, records=[text(body)])


def not_arrived(names: str, what: str, limit: str) -> str:
    """The answer to a worker's request that has waited too long: an error text that names the workers who did not
    come."""
    return f"{names} did not arrive at {what} {limit}"
