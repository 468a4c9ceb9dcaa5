"""strategy=single: one process owns everything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainer.optim.updater import Updater
from trainer.strategies.contract import MakeUpdater, Strategy


class OwnUpdater(Strategy):
    """What every strategy does whose workers own the optimizer."""

    model: nn.Module
    updater: Updater

    def setup(self, model: nn.Module, make_updater: MakeUpdater) -> nn.Module:
        self.model = model
        self.updater = make_updater(model)
        return model

    def backward(self, loss: torch.Tensor) -> None:
        self.updater.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self, samples: int) -> None:
        self.updater.step()

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        self.updater.observe(step, metrics)

    @property
    def lr(self) -> float:
        return self.updater.lr


class Single(OwnUpdater):
    """One process on the whole batch."""

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def scatter(self, parts: list[Any] | None) -> Any:
        assert parts is not None
        return parts[0]

    def synchronize(self) -> None:
        pass
