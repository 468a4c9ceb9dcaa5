"""strategy=collective: DistributedDataParallel, every worker applies the global batch's mean gradient."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.strategies.base import MakeUpdater
from trainer.strategies.group import GroupMember


class Collective(GroupMember):
    """torch's DDP, without its per-forward broadcast of buffers: ``settle`` agrees on them where they are read."""

    ddp: DistributedDataParallel

    def place(self, model: nn.Module, make_updater: MakeUpdater) -> nn.Module:
        super().place(model, make_updater)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers is renamed from torch 2.15 on
            self.ddp = DistributedDataParallel(
                model,
                device_ids=[torch.device(self.seat.device)] if self.seat.device.startswith("cuda") else None,
                broadcast_buffers=False,
                init_sync=False,
                bucket_cap_mb=self.config["bucket_cap_mb"],
                find_unused_parameters=self.config["find_unused_parameters"],
                gradient_as_bucket_view=True,
            )
        return self.ddp

    def weight(self, samples: int) -> float:
        """DDP averages the workers' means; where these have unequal sizes, mine counts samples * workers / all."""
        if self.seat.even:
            return 1.0
        everybody = self.total(torch.tensor([float(samples)], dtype=torch.float64)).item()
        return samples * self.seat.size / everybody

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.ddp.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        with self.naming_the_missing("the exchange of gradients"):
            super().backward(loss)

    def leave(self) -> None:
        self.__dict__.pop("ddp", None)
        super().leave()
