"""Checkpoints of a simulated run: the workers' parts, and what must hold when all processes go on from one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.strategies.contract import Share
from trainer.strategies.pserver.worker.worker import PserverWorker


@dataclass(frozen=True)
class Part:
    """A worker's part, as trainer/worker/state.py has it: where it was in its epochs, its model and its strategy's
    share."""

    epoch: int
    update: int
    share: Share
    model: dict[str, torch.Tensor] = field(default_factory=dict)

    @staticmethod
    def of(strategy: PserverWorker, epoch: int, update: int, share: Share) -> Part:
        """Copied at once: the training goes on."""
        model = {name: p.detach().clone() for name, p in strategy.model.named_parameters()}
        return Part(epoch, update, copy.deepcopy(share), model)

    @staticmethod
    def later(strategy: PserverWorker, epoch: int, update: int, share: Share) -> Part:
        """Not copied: nobody goes on from it but a worker that comes back, for which it has its place alone."""
        return Part(epoch, update, share)

    def put(self, strategy: PserverWorker, folder: Path) -> None:
        """Make a worker what this one was."""
        for name, parameter in strategy.model.named_parameters():
            if parameter.numel():
                parameter.data.copy_(self.model[name])
        strategy.load(folder, copy.deepcopy(self.share))


@dataclass
class Checkpoints:
    """All of a run.

    Attributes:
        told: called when there is a first one. parts: of workers that are written, by checkpoint and rank. whole: those
        that the first worker has completed: its part. newest: the number of the newest one that has all its parts.
    """

    told: Callable[[], None]
    parts: dict[int, dict[int, Part]] = field(default_factory=dict)
    whole: dict[int, Part] = field(default_factory=dict)
    newest: int | None = None

    def add(self, number: int, rank: int, part: Part) -> None:
        """A worker's part is written; the first one completes the checkpoint."""
        self.parts.setdefault(number, {})[rank] = part
        if part.share.workers is not None and part.share.workers[0] == rank:
            self.whole[number] = part
        if (first := self.whole.get(number)) and {*(first.share.workers or ())} <= {*self.parts[number]}:
            before, self.newest = self.newest, max(number, self.newest or 0)
            if before is None:
                self.told()

    def part(self, number: int, rank: int) -> Part:
        """That of a worker; of one that had none, the first one's, as trainer/worker/checkpoints.py does it."""
        return self.parts[number].get(rank, self.whole[number])


@dataclass(frozen=True)
class Before:
    """The lives before, as the next one needs them.

    Attributes:
        saved, disks: theirs. number: of the checkpoint that all go on from; None: there is none, and they begin anew.
        lost: workers of which work may be missing. dropped: blocks that were dropped.
        torn: by vector of the model, pieces that count as applied and are missing, since there were other servers.
        counts: of the checkpoint, by vector: its values, and how often each piece was applied to it.
    """

    saved: Checkpoints
    disks: Any
    number: int | None
    lost: frozenset[int]
    dropped: int
    torn: Mapping[str, frozenset[int]] = field(default_factory=dict)
    counts: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
