"""Clips a worker's own gradient: of dense parameters, and of table rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from trainer.host.transfers import Arriving
from trainer.strategies.pserver.worker.push import Rows


def clip_values(parameters: Iterable[nn.Parameter], rows: Rows, limit: float | None) -> None:
    """Clip each element of a worker's gradient into [-limit, limit]."""
    if limit is not None:
        for values in _gradients(parameters, rows):
            torch._foreach_clamp_min_(values, -limit)
            torch._foreach_clamp_max_(values, limit)


def clip_factor(parameters: Iterable[nn.Parameter], rows: Rows, norm: float | None) -> float:
    """The factor that scales a worker's whole gradient to a norm of at most ``norm``."""
    if norm is None:
        return 1.0
    squares = [torch.stack([g.double().square().sum() for g in values]) for values in _gradients(parameters, rows)]
    square = sum(number for one in squares for number in Arriving([one]).read()[0].tolist())
    return float(min(1.0, norm / (square**0.5 + 1e-6)))


def _gradients(parameters: Iterable[nn.Parameter], rows: Rows) -> Iterator[list[torch.Tensor]]:
    """The dense gradients, which may be on a GPU, and those of rows, which are on the CPU; without empty lists."""
    for values in ([p.grad for p in parameters if p.grad is not None], [values for _, values in rows.values()]):
        if values:
            yield values
