"""Adaptive local SGD: as the loss falls, workers exchange more often, and as the learning rate falls, less often.

After each exchange the next one is ``k = clip(ceil(sqrt(lr_0 * loss / (lr * loss_0) * k_steps)), 1, 16)`` updates away
(Wang and Joshi, 2019, arXiv:1810.08313, as the reference has it). ``loss`` is that of the last update, the mean over
workers, and ``lr`` the rate of the next one; ``loss_0`` and ``lr_0`` are those of the first update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainer.host.transfers import Arriving

MOST = 16


class AdaptiveSteps:
    """The updates between two exchanges, which all workers agree on.

    Args:
        start: ``k_steps``. met: the update from which on they count. device: of the losses.
        wait_for: waits for a GPU, where the losses of an exchange are not there yet.
    """

    def __init__(self, start: int, met: int, device: str, wait_for: Callable[[torch.cuda.Event], object]) -> None:
        self.start, self.wait_for = start, wait_for
        self.steps, self.met = start, met
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.first: torch.Tensor | None = None
        self.lr_0 = self.lr = 0.0
        self.agreed: torch.Tensor | None = None  # loss_0 of all workers
        self.arriving: Arriving | None = None

    def begin(self, lr: float) -> None:
        """Begin an update at this learning rate, before its first batch."""
        self.lr_0 = self.lr_0 or lr
        self.loss = torch.zeros_like(self.loss)

    def add(self, loss: torch.Tensor) -> None:
        """Add a batch's share of the update's loss."""
        self.loss = self.loss + loss.detach()

    def end(self) -> None:
        """End an update."""
        if self.first is None:
            self.first = self.loss

    def due(self, update: int) -> bool:
        """Whether workers exchange after this update."""
        return update >= self.next()

    def next(self) -> int:
        """The update of the next exchange."""
        if self.arriving is not None:
            loss, loss_0 = (float(one) for one in self.arriving.read(self.wait_for)[0])
            self.arriving = None
            self.steps = steps(self.lr_0 * loss, self.lr * loss_0, self.start)
        return self.met + self.steps

    def exchanged(self, update: int, lr: float, share: Any, total: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Agree on the losses, at an exchange.

        Args:
            lr: of the next update. share: of this worker in the mean. total: sums over the workers.
        """
        assert self.first is not None
        sums = total(torch.stack([self.loss, self.first]) * share)
        if self.agreed is None:
            self.agreed = sums[1]
        self.met, self.lr = update, lr
        self.arriving = Arriving([torch.stack([sums[0], self.agreed])])

    def state(self) -> dict[str, Any]:
        """What the next exchanges depend on, for :meth:`load`."""
        self.next()
        return {"steps": self.steps, "met": self.met, "first": self.first, "agreed": self.agreed, "lr_0": self.lr_0}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        vars(self).update(state)


def steps(now: float, then: float, start: int) -> int:
    """The updates until the next exchange. Where the losses say nothing (a rate or a first loss of 0) the most, and
    one where a loss is not finite."""
    if not math.isfinite(now) or not math.isfinite(then):
        return 1
    return min(MOST, max(1, math.ceil(math.sqrt(max(0.0, now / then * start))))) if then > 0 else MOST
