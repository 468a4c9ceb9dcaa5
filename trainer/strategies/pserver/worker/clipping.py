"""Clips a worker's own gradient: of dense parameters, and of table rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from trainer.strategies.pserver.worker.push import Rows


def clip_values(parameters: Iterable[nn.Parameter], rows: Rows, limit: float | None) -> None:
    """Clip each element of a worker's gradient into [-limit, limit]."""
    if limit is not None:
        for values in _gradients(parameters, rows):
            values.clamp_(-limit, limit)


def clip_factor(parameters: Iterable[nn.Parameter], rows: Rows, norm: float | None) -> float:
    """The factor that scales a worker's whole gradient to a norm of at most ``norm``."""
    if norm is None:
        return 1.0
    square = sum(float(g.double().square().sum()) for g in _gradients(parameters, rows))
    return float(min(1.0, norm / (square**0.5 + 1e-6)))


def _gradients(parameters: Iterable[nn.Parameter], rows: Rows) -> Iterator[torch.Tensor]:
    yield from (p.grad for p in parameters if p.grad is not None)
    yield from (gradients for _, gradients in rows.values())
