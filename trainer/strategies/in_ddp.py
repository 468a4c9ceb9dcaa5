"""What strategies have alike whose workers hold the whole model in torch's DistributedDataParallel."""

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
from trainer.strategies.in_group import InGroup
from trainer.strategies.routes import Routes


class InDdp(InGroup):
    """Base class of workers that apply the mean gradient of the global batch.
    Buffers are not broadcast in each forward: ``synchronize`` agrees on them where they are read."""

    routes: Routes | None = None

    def in_ddp(self, model: nn.Module, options: CollectiveStrategy) -> nn.Module:
        """Wrap the model, after the equal start and the updater; sets ``model``, ``ddp`` and ``memory`` (of PowerSGD or
        DGC, or None)."""
        self.model, self.static_graph = model, options.static_graph
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers is renamed from torch 2.15 on
            self.ddp = DistributedDataParallel(
                model,
                device_ids=[torch.device(self.seat.device)] if self.seat.device.startswith("cuda") else None,
                broadcast_buffers=False,
                init_sync=False,
                bucket_cap_mb=options.bucket_cap_mb,
                find_unused_parameters=options.find_unused_parameters,
                gradient_as_bucket_view=options.gradient_as_bucket_view,
                static_graph=options.static_graph,
            )
        if options.reduce_group or options.comm_streams > 1:
            with self.group.naming_the_missing("the start of the groups"):
                self.routes = Routes(self.group, options.comm_streams, options.reduce_group)
        self.memory = register(self.ddp, options, self.updater, self.routes)
        return self.ddp

    def weight(self, denominator: float) -> float | torch.Tensor:
        return self.group.weight(denominator)

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        try:
            with nullcontext() if last else self.ddp.no_sync():
                yield
        except RuntimeError as error:
            if isinstance(error, RunFailed) or "finished reduction" not in str(error):
                raise
            if self.static_graph:
                why = (
                    "uses other parameters than its first (strategy.static_graph=true). Use "
                    "strategy.find_unused_parameters=true instead."
                )
            else:
                why = "left parameters of the model without a gradient. Use strategy.find_unused_parameters=true."
            raise RunFailed(f"worker {self.seat.rank}: an update {why}") from error

    def backward(self, loss: torch.Tensor) -> None:
        with self.group.naming_the_missing("the exchange of gradients"):
            super().backward(loss)

    def step(self, samples: int) -> None:
        self.updater.step()

    def synchronize(self) -> None:
        self.group.agree_on_buffers(self.model)

    def rehearses(self) -> bool:
        """Whether a resumed run must first repeat a backward, because DDP makes other buckets after its first.
        A ring of three or more workers adds up each part of a bucket from another worker on, and PowerSGD's factors
        are of buckets."""
        return self.seat.size > 2 or isinstance(self.memory, PowerSgd)

    def close(self) -> None:
        self.__dict__.pop("ddp", None)  # its reducer goes before the group
        if self.routes is not None:
            self.routes.close()
        super().close()
