"""The workers of mode=eval and mode=predict, which train nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainer.config.schema import GroupStrategy
from trainer.strategies.contract import MakeUpdater, Strategy
from trainer.strategies.process_group import ProcessGroup
from trainer.strategies.seat import Seat


class Evaluators(Strategy):
    """A worker of mode=eval or mode=predict: a process group that adds up sums; all have loaded the same weights."""

    Options = GroupStrategy
    options: GroupStrategy

    lr = 0.0

    def __init__(self, config: Mapping[str, Any], seat: Seat) -> None:
        super().__init__(config, seat)
        self.group = ProcessGroup(seat, self.options)

    def setup(self, model: nn.Module, make_updater: MakeUpdater) -> nn.Module:
        return model

    def backward(self, loss: torch.Tensor) -> None:
        raise AssertionError("nothing is trained here")

    def step(self, samples: int) -> None:
        raise AssertionError("nothing is trained here")

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce_sum(values)

    def wait_for(self, event: torch.cuda.Event) -> None:
        self.group.wait_for(event)

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        self.group.close(self.failed)
