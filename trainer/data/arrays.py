"""A data set that is two tensors in memory, read a whole batch at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset


class ArrayDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Inputs (N, ...) and labels (N,)."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.inputs = inputs
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.labels[index]

    def batch(self, indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The samples of these numbers (a list or an integer array), stacked."""
        chosen = torch.as_tensor(indices)
        return self.inputs[chosen], self.labels[chosen]
