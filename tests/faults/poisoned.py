"""A network in which a value becomes NaN: the data of a test are finite."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.e2e.own_models import Mlp


class Poisoned(Mlp):
    """In chosen training forwards of one worker, a hidden value is NaN, or has a gradient that is.

    Args:
        at: numbers of the forwards, from 1, each counted in a life; rank: of the worker. folder: there, ``poisoned.N``
        tells that forward N was poisoned, which is done once in all lives; empty: in each life. dies: after that
        forward of the life after a poisoned one, the worker dies, once; 0: never. gradient: the value stays, and its
        gradient is NaN.
    """

    def __init__(
        self,
        num_classes: int,
        at: Sequence[int],
        rank: int = 0,
        folder: str = "",
        dies: int = 0,
        gradient: bool = False,
    ) -> None:
        super().__init__(num_classes)
        self.mine = os.environ.get("RANK", "0") == str(rank)
        self.at, self.folder, self.dies, self.gradient, self.count = list(at), folder, dies, gradient, 0
        self.lived = bool(folder) and any(Path(folder).glob("poisoned.*"))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[1](self.layers[0](images))
        if self.training and self.mine:
            self.count += 1
            if self.folder:
                with Path(self.folder, "seen").open("a") as file:
                    file.write(f"{images.double().sum().item()}\n")
            if self.lived and self.count == self.dies and self._first_time("died"):
                os.kill(os.getpid(), signal.SIGKILL)
            if self.count in self.at and self._first_time(f"poisoned.{self.count}"):
                hidden = hidden + (hidden * 0).sqrt() if self.gradient else hidden * float("nan")
        return self.layers[3](self.layers[2](hidden))

    def _first_time(self, what: str) -> bool:
        mark = Path(self.folder, what)
        there = bool(self.folder) and mark.exists()
        if self.folder:
            mark.touch()
        return not there
