"""A network in which a worker dies: a process cannot be killed at an update from outside."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.e2e.own_models import Mlp


class Deadly(Mlp):
    """Dies once for each number.

    Args:
        deaths: folder in which the deaths so far are counted.
        at: in which training forward of a life it dies, for the first, the second, ... life.
        rank: of the worker.
        how: ``kill``, or ``sleep`` for ever.
    """

    def __init__(self, num_classes: int, deaths: str, at: Sequence[int], rank: int, how: str = "kill") -> None:
        super().__init__(num_classes)
        self.deaths, self.how, self.count = Path(deaths), how, 0
        mine = os.environ.get("RANK", "0") == str(rank)
        died = len(list(self.deaths.glob("death.*")))
        self.at = at[died] if mine and died < len(at) else 0
        self.died = died

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.count += self.training
        if self.training and self.count == self.at:
            if self.how == "sleep":
                sleeps_for_ever()
            (self.deaths / f"death.{self.died}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(images)


def sleeps_for_ever() -> None:
    while True:
        time.sleep(60)
