"""A line of the log between the update at which it is due and the moment at which its numbers are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer.data.feed import Batch
from trainer.host.transfers import Arriving
from trainer.run_folder.report import Due


@dataclass(frozen=True)
class Position:
    """Position of a batch in the run.

    Attributes:
        epoch, update: epoch, and update of the epoch, from 0. step: update of the run, from 1.
        number: batch of the epoch, from 0.
    """

    epoch: int
    update: int
    step: int
    number: int


@dataclass(frozen=True)
class BatchLoss(Position):
    """Loss of a batch, and the position of the batch in the run.

    Attributes:
        loss: mean loss (). batch: None: it is not kept.
    """

    loss: torch.Tensor
    batch: Batch | None = None


@dataclass
class Line:
    """A line whose sums are made, and of a GPU are on their way to the host.

    Attributes:
        numbers: sums of what is shown, sums of the epoch, samples since the last line; with ``own`` the sums of this
        worker alone, and with callbacks the sum of :meth:`Callbacks.asked`.
        due: when the line was due; None: when its numbers are there.
        losses, at: what ``StepHook.after_log`` gets. shown, loss: it is printed, and had this loss.
        The others: see :meth:`Report.training`.
    """

    numbers: Arriving
    own: bool
    due: Due | None
    batch: int
    lr: float
    gauges: dict[str, float]
    rest: bool
    losses: Sequence[BatchLoss]
    at: Position
    shown: bool = False
    loss: float | None = None
