"""Keeps the weights of the best validation so far."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from torch import nn

from trainer.checkpoint.pinned import PinnedMemory
from trainer.checkpoint.store import BEST, CHECKPOINTS
from trainer.errors import why
from trainer.strategies.contract import Strategy
from trainer.strategies.lost_workers import was_lost
from trainer.strategies.seat import Seat
from trainer.worker.model import save_by_first


def save_best(
    model: nn.Module, strategy: Strategy, seat: Seat, run_dir: Path, pinned: PinnedMemory, first: bool = True
) -> None:
    """Write the model as the best one so far. On a full disk the best model before stays.

    Args:
        first: this worker writes; the others only take part where they hold shards.
        pinned: memory for the copy of a model on a GPU, which is kept from one best model to the next.

    The file also stays if this worker was stopped while it wrote and counted as lost. Another worker then keeps the
    best model, and may already have a better one.
    """
    path = run_dir / CHECKPOINTS / BEST
    try:
        save_by_first(strategy, model, path, first, lambda: not was_lost(seat.store, seat.rank), pinned)
    except (OSError, SafetensorError) as error:  # a full disk: the training goes on, as without a checkpoint
        print(
            f"the best model cannot be written: {why(error)}; the one before stays, and the next best one is written",
            flush=True,
        )
