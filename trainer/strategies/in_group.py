"""What strategies with a torch process group have alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainer.config.schema import GroupStrategy
from trainer.strategies.contract import Strategy
from trainer.strategies.process_group import ProcessGroup
from trainer.strategies.seat import Seat


class InGroup(Strategy):
    """Base class of workers with a process group, over which they add up sums and in which the missing are named."""

    Options = GroupStrategy
    options: GroupStrategy

    def __init__(self, config: Mapping[str, Any], seat: Seat) -> None:
        super().__init__(config, seat)
        self.group = ProcessGroup(seat, self.options)

    def scatter(self, parts: list[Any] | None) -> Any:
        return self.group.scatter(parts)

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce_sum(values)

    def wait_for(self, event: torch.cuda.Event) -> None:
        self.group.wait_for(event)

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        self.updater.observe(step, metrics)

    def close(self) -> None:
        self.group.close(self.failed)
