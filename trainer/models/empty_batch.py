"""A worker that has no sample left in an update goes through it with one that counts for nothing; its model must not learn of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.models.sync_batch_norm import GlooSyncBatchNorm


def counting(model: nn.Module, samples: int) -> AbstractContextManager[None]:
    """While a forward runs on so many samples that count; with none, batch norms leave their statistics as they are."""
    return nullcontext() if samples else _sitting_out(model)


@contextmanager
def _sitting_out(model: nn.Module) -> Iterator[None]:
    """Own batch norms rest; those over all workers take part in the exchange, with nothing in it.

    torch's nn.SyncBatchNorm cannot, and counts the sample.
    """
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
