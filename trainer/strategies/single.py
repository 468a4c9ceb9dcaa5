"""strategy=single: one process trains on the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainer.strategies.contract import MakeUpdater, Strategy


class Single(Strategy):
    """The only worker of strategy=single, which trains on the whole batch."""

    def setup(self, model: nn.Module, make_updater: MakeUpdater) -> nn.Module:
        self.updater = make_updater(model)
        return model

    def scatter(self, parts: list[Any] | None) -> Any:
        assert parts is not None
        return parts[0]

    def step(self, samples: int) -> None:
        self.updater.step()

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def synchronize(self) -> None:
        pass

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        self.updater.observe(step, metrics)
