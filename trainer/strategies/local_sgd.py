"""strategy=local_sgd: each worker takes its own steps, and every k_steps updates the parameters are averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.config.schema import LocalSgdStrategy
from trainer.strategies.contract import MakeUpdater, Share
from trainer.strategies.in_group import InGroup
from trainer.strategies.seat import Seat

SINCE = "since"
"""In a worker's share of a checkpoint: updates so far; since the last average updates, and the loss's denominators."""


class LocalSgd(InGroup):
    """A worker of strategy=local_sgd (Stich, 2019, arXiv:1805.09767).
    The average is weighted by the samples behind each replica, or with class weights by the sum of theirs."""

    Options = LocalSgdStrategy
    options: LocalSgdStrategy

    def __init__(self, config: Mapping[str, Any], seat: Seat) -> None:
        super().__init__(config, seat)
        self.updates = 0
        self.since = 0  # the last average: updates, which all workers make, also where one has no sample in them
        self.coming: float | None = None
        self.denominator = 0.0

    def setup(self, model: nn.Module, make_updater: MakeUpdater) -> nn.Module:
        self.group.equal_start(model)
        self.model, self.updater = model, make_updater(model)
        self.parameters: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
        return model

    def weight(self, denominator: float) -> float:
        self.coming = denominator
        return 1.0

    def step(self, samples: int) -> None:
        self.updater.step()
        self._done(samples)

    def skip(self, samples: int) -> None:
        self.updater.skip()
        self._done(samples)

    def _done(self, samples: int) -> None:
        """An update is over, after which the workers may meet."""
        self.updates += 1
        self.since += 1
        self.denominator += samples if self.coming is None else self.coming
        if self.updates <= self.options.begin_step or self.updates % self.options.k_steps == 0:
            self._average()

    def next_meeting(self, step: int) -> int:
        following = step + 1
        if following <= self.options.begin_step:
            return following
        return -(-following // self.options.k_steps) * self.options.k_steps

    def save(self, folder: Path) -> Share:
        return Share({"updater": self.updater.state()}, {SINCE: (self.updates, self.since, self.denominator)})

    def load(self, folder: Path, share: Share) -> None:
        super().load(folder, share)
        self.updates, self.since, self.denominator = share.own[SINCE]

    def weights(self, own: Sequence[Mapping[str, Any]]) -> list[float]:
        behind = [one[SINCE][-1] for one in own]
        return [one / sum(behind) if any(behind) else 1 / len(behind) for one in behind]

    def averaged(self, own: Mapping[str, Any]) -> dict[str, Any]:
        return {SINCE: (own[SINCE][0], 0, 0.0)}

    @torch.no_grad()
    def _average(self) -> None:
        """Replace my parameters by the mean over workers, weighted by the denominators since the last average."""
        with self.group.naming_the_missing("the average of the parameters"):
            share = self._share_of_average()
            # In logical order: in memory the elements of channels_last weights lie otherwise, and `view` refuses them.
            weighted = torch.cat([p.reshape(-1) for p in self.parameters]).mul_(share)
            dist.all_reduce(weighted)
        parts = weighted.split([p.numel() for p in self.parameters])
        mean = [part.view(p.shape) for p, part in zip(self.parameters, parts, strict=True)]
        torch._foreach_copy_(self.parameters, mean)
        self.since, self.denominator = 0, 0.0

    def _share_of_average(self) -> float | torch.Tensor:
        """This worker's share of the mean. If shares differ, it stays on the device: reading it would wait."""
        if self.seat.others.even:
            return 1.0 / self.seat.size
        own = torch.full((), self.denominator, dtype=torch.float64, device=self.seat.device)
        everybody = own.clone()
        dist.all_reduce(everybody)
        return torch.where(everybody > 0, own / everybody, 1.0 / self.seat.size)

    def synchronize(self) -> None:
        if self.since:
            self._average()
        self.group.agree_on_buffers(self.model)
