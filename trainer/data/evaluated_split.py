"""Feeds the samples of a split that is measured, the validation or the test data, each exactly once over all
workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from trainer.data.batch_inputs import Inputs, each
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
        sampler: of the split's samples; limit: batches of a worker that are measured; None: all.
        outputs: label of the data -> index of the model's output for that class; empty: the label itself.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | None,
        sampler: EvaluationSampler,
        limit: int | None,
        reading: Reading,
        place: Placement,
        outputs: Sequence[int] = (),
    ) -> None:
        self.sampler, self.limit, self.place = sampler, limit, place
        self.reader = Reader(dataset, reading)
        self.outputs = torch.tensor(outputs, dtype=torch.int64) if outputs else None
        self.outputs_there = None if self.outputs is None else self.outputs.to(place.device)

    @property
    def has_numbers(self) -> bool:
        """Whether there are samples that can be read by their number."""
        return self.reader.dataset.dataset is not None and bool(self.sampler.num_samples)

    def batches(self, index: int, count: int) -> Iterator[tuple[np.ndarray, Inputs, torch.Tensor, torch.Tensor]]:
        """Yield the batches of worker ``index`` of ``count``: the samples' indices (N,), inputs, labels (N,), and the
        labels on the CPU, which need not be waited for."""
        for numbers, inputs, read in self._read(index, count):
            inputs, labels = self.place(inputs, read)
            if self.outputs is not None and self.outputs_there is not None:
                labels, read = self.outputs_there[labels], self.outputs[read]
            yield numbers, inputs, labels, read

    def _read(self, index: int, count: int) -> Iterator[tuple[np.ndarray, Inputs, torch.Tensor]]:
        if isinstance(stream := self.reader.dataset.dataset, InOrder):
            for numbers, batch in islice(stream.shares(index, count, self.sampler.batch_size), self.limit):
                yield numbers, *batch
            return
        addresses = Addresses(self.sampler.of(index, count), self.limit)
        for (_, numbers), (inputs, labels) in zip(addresses, self.reader.read(addresses), strict=True):
            yield numbers, inputs, labels

    def inputs(self, numbers: Sequence[int]) -> Inputs:
        """The inputs of the samples with these indices, as the data source gives them, on the CPU."""
        inputs: Inputs = self.reader.dataset.__getitems__((0, np.array(numbers, dtype=np.int64)))[0]
        return each(torch.Tensor.cpu, inputs)

    def files_of(self, numbers: Sequence[int]) -> list[str]:
        """The file of each of these samples, by the data set's ``sample_name``; '' if it has no such method."""
        named = getattr(self.reader.dataset.dataset, "sample_name", None)
        return [one_line(str(named(number))) if named is not None else "" for number in numbers]
