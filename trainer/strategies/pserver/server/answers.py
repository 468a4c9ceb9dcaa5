"""What a handler says to a request besides doing it: that it cannot be, or that it has to wait for somebody."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.strategies.pserver.protocol.messages import Malformed, Message, Verb, text

NONSENSE = (Malformed, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, OSError)
"""What a request raises whose content makes no sense, and a disk that is full; its sender is told, the server goes
on."""


class NotYet(Exception):
    """Raised by a handler whose request has to wait: for whom, at what."""

    def __init__(self, ranks: list[int], what: str) -> None:
        super().__init__(what)
        self.ranks, self.what = ranks, what


def failed(why: str, fenced: bool = False, over: bool = False, missing: Iterable[int] = ()) -> Message:
    """The answer to a request that fails; ``fenced``: because its worker does not take part any more; ``over``: because
    the server cannot go on without another one; ``missing``: the workers for whom it has waited in vain."""
    body = {"why": why, "fenced": fenced, "over": over, "missing": sorted(missing)}
    return Message(Verb.FAILED, records=[text(body)])


def not_arrived(names: str, what: str, limit: str) -> str:
    """The answer to a worker's request that has waited too long: an error text that names the workers who did not
    come."""
    return f"{names} did not arrive at {what} {limit}"
