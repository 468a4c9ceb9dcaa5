"""The numbers by which a server knows messages that were meant for a life of it before."""

from __future__ import annotations

LIFE_BITS, SERVER_BITS = 14, 17
"""Of an incarnation: the worker's lives at this server; above them a number of the server's own life, 0 for the
first."""


def first_incarnation(life: int, again: bool) -> int:
    """What the incarnations of workers begin with at a server: no message to a life of it before fits another one.

    Args:
        life: the random number of the server's life. again: it was started again.
    """
    return (1 + life % ((1 << SERVER_BITS) - 1)) << LIFE_BITS if again else 0
