"""Lets a worker without samples run an update on a placeholder, without changing batch-norm statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

if TYPE_CHECKING:
    from trainer.models.sync_batch_norm import GlooSyncBatchNorm


def counting(model: nn.Module, samples: int) -> AbstractContextManager[None]:
    """Context manager for a forward: without samples that count, batch norms keep their running statistics."""
    return nullcontext() if samples else _sitting_out(model)


@contextmanager
def _sitting_out(model: nn.Module) -> Iterator[None]:
    """Own batch norms rest; those over all workers take part in the exchange, with nothing in it.

    torch's nn.SyncBatchNorm cannot, and counts the sample.
    """
    from trainer.models.sync_batch_norm import GlooSyncBatchNorm

    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training]
    together = [m for m in norms if isinstance(m, GlooSyncBatchNorm)]
    alone = [m for m in norms if not isinstance(m, (GlooSyncBatchNorm, nn.SyncBatchNorm))]
    _count(together, alone, False)
    try:
        yield
    finally:
        _count(together, alone, True)


def _count(together: list[GlooSyncBatchNorm], alone: list[_BatchNorm], counts: bool) -> None:
    for synchronised in together:
        synchronised.share = float(counts)
    for norm in alone:
        norm.training = counts
