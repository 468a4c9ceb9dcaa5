"""Feeds the samples of a split that is measured, the validation or the test data, each exactly once over all
workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from trainer.data.batch_inputs import Inputs
from trainer.data.placement import Placement
from trainer.data.reader import Addresses, InOrder, Reader, Reading
from trainer.data.sampler import EvaluationSampler
from trainer.visible import one_line

VAL, TEST = "val", "test"
"""The splits that are measured: while a run trains, and once at its end."""


class EvaluatedSplit:
    """One worker's share of a split's samples, in batches on the device.

    Args:
        dataset: of the split; None: it is never read.
        addresses: of the split's :class:`EvaluationSampler`.
        outputs: for each label of the data, the model's output of that class; empty: the one of its number.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | None,
        addresses: Addresses,
        reading: Reading,
        place: Placement,
        outputs: Sequence[int] = (),
    ) -> None:
        assert isinstance(addresses.sampler, EvaluationSampler)
        self.sampler, self.addresses, self.place = addresses.sampler, addresses, place
        self.reader = Reader(dataset, addresses, reading)
        self.outputs = torch.tensor(outputs, dtype=torch.int64, device=place.device) if outputs else None

    @property
    def has_numbers(self) -> bool:
        """Whether there are samples that can be read by their number."""
        return self.reader.dataset.dataset is not None and bool(self.sampler.num_samples)

    def batches(self, index: int, count: int) -> Iterator[tuple[np.ndarray, Inputs, torch.Tensor]]:
        """Yield the batches of worker ``index`` of ``count``: the samples' indices (N,), inputs and labels (N,)."""
        for numbers, inputs, labels in self._read(index, count):
            inputs, labels = self.place(inputs, labels)
            yield numbers, inputs, labels if self.outputs is None else self.outputs[labels]

    def _read(self, index: int, count: int) -> Iterator[tuple[np.ndarray, Inputs, torch.Tensor]]:
        if isinstance(stream := self.reader.dataset.dataset, InOrder):
            for numbers, batch in islice(stream.shares(index, count, self.sampler.batch_size), self.addresses.limit):
                yield numbers, *batch
            return
        self.addresses.sampler = self.sampler.of(index, count)
        for (_, numbers), (inputs, labels) in zip(self.addresses, self.reader, strict=True):
            yield numbers, inputs, labels

    def inputs(self, numbers: Sequence[int]) -> Inputs:
        """The inputs of the samples with these indices, as the data source gives them."""
        inputs: Inputs = self.reader.dataset.__getitems__((0, np.array(numbers, dtype=np.int64)))[0]
        return inputs

    def files_of(self, numbers: Sequence[int]) -> list[str]:
        """What the samples with these indices were read from, by the data set's ``sample_name``; '' where it has
        none."""
        named = getattr(self.reader.dataset.dataset, "sample_name", None)
        return [one_line(str(named(number))) if named is not None else "" for number in numbers]
