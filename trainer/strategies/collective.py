"""strategy=collective: DistributedDataParallel; every worker applies the mean gradient of the global batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.checkpoint.tensor_tree import on_device
from trainer.config.schema import CollectiveStrategy
from trainer.errors import RunFailed
from trainer.strategies.comm_hooks import PowerSgd, register
from trainer.strategies.contract import MakeUpdater, Share
from trainer.strategies.dgc import Dgc
from trainer.strategies.in_group import InGroup


class Collective(InGroup):
    """A worker of strategy=collective: torch's DDP.
    Buffers are not broadcast in each forward: ``synchronize`` agrees on them where they are read."""

    Options = CollectiveStrategy
    options: CollectiveStrategy

    def setup(self, model: nn.Module, make_updater: MakeUpdater) -> nn.Module:
        self.group.equal_start(model)
        self.model, self.updater = model, make_updater(model)
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
        self.memory = register(self.ddp, self.options, self.updater)
        return self.ddp

    def weight(self, denominator: float) -> float | torch.Tensor:
        return self.group.weight(denominator) * (self.seat.size if self.options.gradient_scale == "sum" else 1)

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        try:
            with nullcontext() if last else self.ddp.no_sync():
                yield
        except RuntimeError as error:
            if isinstance(error, RunFailed) or "finished reduction" not in str(error):
                raise
            if self.options.static_graph:
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
        (self.memory if isinstance(self.memory, Dgc) else self.updater).step()

    def synchronize(self) -> None:
        self.group.agree_on_buffers(self.model)

    def rehearses(self) -> bool:
        """Whether a resumed run must first repeat a backward, because DDP makes other buckets after its first.
        A ring of three or more workers adds up each part of a bucket from another worker on, and PowerSGD's factors
        are of buckets."""
        return self.seat.size > 2 or isinstance(self.memory, PowerSgd)

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

    def close(self) -> None:
        self.__dict__.pop("ddp", None)  # its reducer goes before the group
        super().close()
