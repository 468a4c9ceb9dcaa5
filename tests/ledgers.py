"""What the servers' ledgers (``strategy.ledger=true``) show of a run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

Batch = tuple[int, int, int]
"""Epoch, block, batch."""
Lines = list[tuple[int, int, list[Batch]]]
"""Worker, push, and the batches that it covers."""


def lines_of(path: Path) -> Lines:
    """The lines of a ledger."""
    head, *told = path.read_text().splitlines()
    assert head.split("\t") == ["worker", "push", "epoch", "block", "first", "after_last"]
    found = []
    for line in told:
        worker, push, *piece = line.split("\t")
        batches = []
        if any(piece):  # in geo differences are exchanged at a meeting, too
            epoch, block, first, after_last = (int(n) for n in piece)
            batches = [(epoch, block, batch) for batch in range(first, after_last)]
        found.append((int(worker), int(push), batches))
    return found


def applied(path: Path) -> Counter[Batch]:
    """How often each batch stands in a ledger."""
    return Counter(batch for *_, batches in lines_of(path) for batch in batches)
