"""A map-style data set of tensors in memory, read a whole batch at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from trainer.data.batch_inputs import Inputs, each
from trainer.host.transfers import on_its_way


class ArrayDataset(Dataset[tuple[Inputs, torch.Tensor]]):
    """A data set of tensors in memory: inputs (N, ...), or a dict of such, and labels (N,).

    Args:
        file: what the samples were read from, in their order; '' if that is no file.
    """

    def __init__(self, inputs: Inputs, labels: torch.Tensor, file: str = "") -> None:
        self.inputs = inputs
        self.labels = labels
        self.file = file

    def resident(self, device: torch.device) -> ArrayDataset:
        """This data set with its inputs on a device. Labels stay on the CPU."""
        return ArrayDataset(each(lambda tensor: tensor.to(device), self.inputs), self.labels, self.file)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Inputs, torch.Tensor]:
        return each(lambda tensor: tensor[index], self.inputs), self.labels[index]

    def sample_name(self, number: int) -> str:
        """The file and the row of the sample with this index, counted from 0; '' without a file."""
        return f"{self.file}, row {number}" if self.file else ""

    def batch(self, indices: Any) -> tuple[Inputs, torch.Tensor]:
        """Return the samples with these indices (a list or an integer array), stacked as one batch."""
        chosen = torch.as_tensor(indices)
        return each(lambda tensor: tensor[on_its_way(chosen, tensor.device)], self.inputs), self.labels[chosen]
