"""strategy=collective: DistributedDataParallel; every worker applies the mean gradient of the global batch."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from trainer.checkpoint.tensor_tree import on_device
from trainer.config.schema import CollectiveStrategy
from trainer.strategies.contract import MakeUpdater, Share
from trainer.strategies.dgc import Dgc
from trainer.strategies.in_ddp import InDdp


class Collective(InDdp):
    """A worker of strategy=collective: torch's DDP."""

    Options = CollectiveStrategy
    options: CollectiveStrategy

    def setup(self, model: nn.Module, make_updater: MakeUpdater) -> nn.Module:
        self.group.equal_start(model)
        self.updater = make_updater(model)
        return self.in_ddp(model, self.options)

    def weight(self, denominator: float) -> float | torch.Tensor:
        return super().weight(denominator) * (self.seat.size if self.options.gradient_scale == "sum" else 1)

    def step(self, samples: int) -> None:
        if isinstance(self.memory, Dgc):
            self.memory.step()
        else:
            super().step(samples)

    def save(self, folder: Path) -> Share:
        own = {} if self.memory is None else {"of": [self.seat.rank, self.seat.size], "memory": self.memory.state()}
        return Share({"updater": self.updater.state()}, own)

    def load(self, folder: Path, share: Share) -> None:
        super().load(folder, share)
        is_its_own = share.own.get("of") == [self.seat.rank, self.seat.size]  # else it goes with other gradients
        if isinstance(self.memory, Dgc):
            self.memory.forget()  # what a rehearsal has left
        if self.memory is not None and is_its_own:
            self.memory.load(**on_device(share.own["memory"], self.seat.device))

    def gauges(self) -> dict[str, float]:
        return {"comm/compression": self.memory.compression} if self.memory is not None else {}

    def last_gauges(self) -> dict[str, float]:
        return {}
