"""A network whose outputs are NaN in a chosen update."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from tests.e2e.own_models import Mlp


class Poisoned(Mlp):
    """In chosen training forwards of a rank, the second layer's input is NaN.

    Args:
        at: numbers of the forwards, from 1; rank: of the worker.
        marks: folder; each forward is poisoned once in all lives, with the file ``poisoned.N`` there. Empty: in each life.
        sums: file to which the rank adds a line with each training batch's sum.
    """

    def __init__(
        self, num_classes: int, at: Sequence[int], rank: int = 0, marks: str = "", sums: str = "", norm: bool = False
    ) -> None:
        super().__init__(num_classes)
        self.mine = os.environ.get("RANK", "0") == str(rank)
        self.at, self.marks, self.sums, self.count = list(at), marks, sums, 0
        self.norm = nn.BatchNorm1d(32) if norm else nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.count += self.training
        hidden = self.layers[1](self.layers[0](images))
        if self.training and self.mine:
            if self.sums:
                with Path(self.sums).open("a") as file:
                    file.write(f"{images.double().sum().item()}\n")
            if self.count in self.at and self._first_time():
                hidden = hidden * float("nan")
        return self.layers[3](self.layers[2](self.norm(hidden)))

    def _first_time(self) -> bool:
        if not self.marks:
            return True
        mark = Path(self.marks) / f"poisoned.{self.count}"
        there = mark.exists()
        mark.touch()
        return not there
