"""Reorders the batches of an epoch after the run has gone back to a checkpoint (``on_nonfinite=rewind``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

Cut = TypeVar("Cut")


class Rewind(NamedTuple):
    """A return to a checkpoint, after which the batches come in another order, to avoid the same NaN again.

    Attributes:
        epoch, update: where the checkpoint was made.
        bad_epoch, bad_update: the update that was not finite.
    """

    epoch: int
    update: int
    bad_epoch: int
    bad_update: int


def reordered(cuts: Sequence[Cut], merge: int, epoch: int, rewinds: Sequence[Rewind]) -> list[Cut]:
    """Return the batches of an epoch in their new order, after each return to a checkpoint in ``rewinds``.

    In the epoch of the update that was not finite, the updates after it come first, then those before it. Its own
    batches are left out, and the first of the others come twice, so that the epoch is as long as before. In epochs
    between that and the checkpoint, the second half comes first. An update that is shorter than the others stays the
    last one.

    Args:
        cuts: of the whole epoch, in order; merge: batches of an update.
    """
    whole = len(cuts) // merge * merge
    updates = [list(cuts[start : start + merge]) for start in range(0, whole, merge)]
    for rewind in rewinds:
        if rewind.epoch <= epoch <= rewind.bad_epoch:
            first = rewind.update if epoch == rewind.epoch else 0
            bad = rewind.bad_update - first if epoch == rewind.bad_epoch else None
            updates[first:] = _reordered(updates[first:], bad)
    return [cut for update in updates for cut in update] + list(cuts[whole:])


def _reordered(rest: list[list[Cut]], bad: int | None) -> list[list[Cut]]:
    if bad is None or bad >= len(rest):
        half = len(rest) // 2
        return rest[half:] + rest[:half]
    others = rest[bad + 1 :] + rest[:bad]
    return others + (others or rest)[:1]
