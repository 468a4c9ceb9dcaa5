"""Lets a worker without samples run an update on a placeholder, without changing batch-norm statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

if TYPE_CHECKING:
    from trainer.models.sync_batch_norm import SyncBatchNorm


def counting(model: nn.Module, samples: int) -> AbstractContextManager[None]:
    """Context manager for a forward: if ``samples`` is 0, batch norms keep their running statistics."""
    return nullcontext() if samples else _without_statistics(model)


@contextmanager
def _without_statistics(model: nn.Module) -> Iterator[None]:
    """Batch norms keep their running statistics; synchronised ones take part in the all-reduce with weight 0.

    torch's nn.SyncBatchNorm, which a model may bring itself, has no such weight: it counts the placeholder.
    """
    from trainer.models.sync_batch_norm import SyncBatchNorm

    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training]
    together = [m for m in norms if isinstance(m, SyncBatchNorm)]
    alone = [m for m in norms if not isinstance(m, (SyncBatchNorm, nn.SyncBatchNorm))]
    _count(together, alone, False)
    try:
        yield
    finally:
        _count(together, alone, True)


def _count(together: list[SyncBatchNorm], alone: list[_BatchNorm], counts: bool) -> None:
    for synchronised in together:
        synchronised.share = float(counts)
    for norm in alone:
        norm.training = counts
