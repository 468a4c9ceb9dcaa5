"""data.prefetch=auto: how many batches reading processes keep ready."""

from __future__ import annotations

from math import ceil

READY, LEAST_READY = 4, 2
"""Batches that all reading processes of a worker keep ready, and each of them at least."""


def ready_each(readers: int) -> int:
    """The number of batches that each of ``readers`` reading processes keeps ready with data.prefetch=auto."""
    return max(LEAST_READY, ceil(READY / readers))
