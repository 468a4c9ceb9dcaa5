"""strategy=collective: DistributedDataParallel, every worker applies the global batch's mean gradient."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.config.schema import CollectiveStrategy
from trainer.errors import RunFailed
from trainer.strategies.comm_hooks import PowerSgd, register
from trainer.strategies.contract import MakeUpdater
from trainer.strategies.process_group import GroupMember


class Collective(GroupMember):
    """torch's DDP, without its per-forward broadcast of buffers: ``synchronize`` agrees on them where they are read."""

    Options = CollectiveStrategy
    options: CollectiveStrategy

    ddp: DistributedDataParallel
    memory: PowerSgd | None

    def setup(self, model: nn.Module, make_updater: MakeUpdater) -> nn.Module:
        super().setup(model, make_updater)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers is renamed from torch 2.15 on
            self.ddp = DistributedDataParallel(
                model,
                device_ids=[torch.device(self.seat.device)] if self.seat.device.startswith("cuda") else None,
                broadcast_buffers=False,
                init_sync=False,
                bucket_cap_mb=self.options.bucket_cap_mb,
                find_unused_parameters=self.options.find_unused_parameters,
                gradient_as_bucket_view=self.options.gradient_as_bucket_view,
                static_graph=self.options.static_graph,
            )
        self.memory = register(self.ddp, self.options)
        return self.ddp

    def weight(self, samples: int) -> float:
        """DDP averages the workers' means; where these have unequal sizes, mine counts samples * workers / all."""
        if self.seat.even:
            return 1.0
        everybody = self.all_reduce_sum(torch.tensor([float(samples)], dtype=torch.float64)).item()
        return samples * self.seat.size / everybody

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        try:
            with nullcontext() if last else self.ddp.no_sync():
                yield
        except RuntimeError as error:
            if isinstance(error, RunFailed) or "finished reduction" not in str(error):
                raise
            if self.options.static_graph:
                why = "uses other parameters than its first (strategy.static_graph=true). Use strategy.find_unused_parameters=true instead."
            else:
                why = "left parameters of the model without a gradient. Use strategy.find_unused_parameters=true."
            raise RunFailed(f"worker {self.seat.rank}: an update {why}") from error

    def backward(self, loss: torch.Tensor) -> None:
        with self.naming_the_missing("the exchange of gradients"):
            super().backward(loss)

    def gauges(self) -> dict[str, float]:
        return {"comm/compression": self.memory.compression} if self.memory is not None else {}

    def close(self) -> None:
        self.__dict__.pop("ddp", None)
        super().close()
