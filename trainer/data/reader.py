"""Reads the batches of a data set in a sampler's order, in this process or in reading processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from trainer.data.augment.seeded import Seeded
from trainer.data.batch_inputs import Inputs, each
from trainer.data.sampler import EvaluationSampler, EverybodysBatches, TrainingSampler

if TYPE_CHECKING:
    from trainer.data.augment.mixing import Mixing
    from trainer.data.auto_num_workers import Rest
    from trainer.data.shared_batches import SharedBatches

Scatter = Callable[[list[tuple[Inputs, torch.Tensor]] | None], tuple[Inputs, torch.Tensor]]
"""The first worker gives everybody's batches by rank, the others None; each gets its own."""


class InOrder(Dataset[Any]):
    """Base class of data sets that can only be read by rising positions (:class:`trainer.data.streamed.Streamed`)."""

    def shares(self, index: int, count: int, size: int) -> Iterator[tuple[np.ndarray, tuple[Inputs, torch.Tensor]]]:
        """Yield the batches of an evaluation that worker ``index`` of ``count`` measures, with the samples' numbers."""
        raise NotImplementedError


class Addresses:
    """Iterates over a sampler's batches as (epoch, indices), from batch ``first`` on, at most ``limit`` per epoch."""

    def __init__(self, sampler: TrainingSampler | EvaluationSampler | EverybodysBatches, limit: int | None) -> None:
        self.sampler = sampler
        self.limit = limit
        self.first = 0

    @property
    def of_epoch(self) -> int:
        """The number of batches in a whole epoch, whatever ``first`` is."""
        return len(self.sampler) if self.limit is None else min(self.limit, len(self.sampler))

    def __len__(self) -> int:
        return max(0, self.of_epoch - self.first)

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        epoch = getattr(self.sampler, "epoch", 0)
        for batch in islice(self.sampler.arrays(), self.first, self.of_epoch):
            yield epoch, batch


@dataclass(frozen=True)
class Reading:
    """How a :class:`Reader` reads: number of processes, batches kept ready, pinned memory, mixing.

    Attributes:
        seed: of the augmentation.
        num_workers: reading processes; prefetch: batches that each of them keeps ready.
        pin_memory: page-locked batches.
        mixing: of training batches.
    """

    seed: int = 0
    num_workers: int = 0
    prefetch: int = 2
    pin_memory: bool = False
    mixing: Mixing | None = None


HERE = Reading()
"""By this process itself, one batch when it is asked for."""


class Reader:
    """Reads the batches of one data set in a sampler's order, in this process or in reading processes."""

    def __init__(self, dataset: Dataset[Any] | None, addresses: Addresses, reading: Reading) -> None:
        self.dataset = Seeded(dataset, reading.seed, reading.mixing)
        self.addresses = addresses
        self.num_workers, self.prefetch, self.pin_memory = reading.num_workers, reading.prefetch, reading.pin_memory
        self.rest: Rest | None = None
        self.loader: DataLoader[Any] | None = None
        self.shared: SharedBatches | None = None
        self.retired: DataLoader[Any] | None = None
        self.seeds = torch.Generator().manual_seed(reading.seed)
        """Of the processes, so that reading takes nothing of the training's randomness."""

    def __iter__(self) -> Iterator[tuple[Inputs, torch.Tensor]]:
        if not self.num_workers:
            for address in self.addresses:
                inputs, labels = self.dataset.__getitems__(address)
                if self.pin_memory:
                    inputs, labels = each(torch.Tensor.pin_memory, inputs), labels.pin_memory()
                yield inputs, labels
            return
        read, batches = 0, self._begin(0)
        while read < len(self.addresses):
            if self.loader is None:
                batches = self._begin(read)
            yield next(batches)
            read += 1

    def begin_at(self, first: int) -> None:
        """Set the first batch that is read of the next epoch."""
        self.addresses.first = first

    def grow(self, num_workers: int, prefetch: int) -> None:
        """From the next batch on, read with ``num_workers`` processes that keep ``prefetch`` batches ready each."""
        self.num_workers, self.prefetch = num_workers, prefetch
        self.retired, self.loader = self.loader, None

    def _begin(self, first: int) -> Iterator[tuple[Inputs, torch.Tensor]]:
        """The epoch's batches from that one on; the processes stay for the next epoch."""
        # a reader without processes imports none of these
        from trainer.data.auto_num_workers import Rest
        from trainer.data.reading_processes import ReaderDataset, as_it_is, from_processes, reading_process
        from trainer.data.shared_batches import SharedBatches

        self.rest = self.rest or Rest(self.addresses)
        if self.loader is None:
            shares = SharedBatches.possible() and not self.pin_memory  # what is pinned is copied anyway
            self.shared = SharedBatches(self.num_workers) if shares else None
            self.loader = DataLoader(
                ReaderDataset(self.dataset, self.shared),
                batch_sampler=self.rest,  # type: ignore[arg-type]
                num_workers=self.num_workers,
                prefetch_factor=self.prefetch,
                collate_fn=as_it_is,
                pin_memory=self.pin_memory,
                persistent_workers=True,
                worker_init_fn=reading_process,
                generator=self.seeds,
            )
        self.rest.first = first
        batches = from_processes(iter(self.loader), self.shared)
        self._retire()
        return batches

    def _retire(self) -> None:
        """End the reading processes that are no longer needed."""
        if self.retired is not None:
            from trainer.data.reading_processes import end_processes

            end_processes(self.retired)
        self.retired = None

    def close(self) -> None:
        """End the reading processes of this reader."""
        self._retire()
        self.retired, self.loader = self.loader, None
        self._retire()
        self.shared = None


class ScatteredReader:
    """data.read=scatter: the first worker reads the batches of all workers and sends each worker its own.

    Args:
        reader: of everybody's batches, on the first worker; None on the others.
        batches: (addresses) of this worker.
        workers: how many there are.
        scatter: the strategy's.
    """

    def __init__(self, reader: Reader | None, batches: Addresses, workers: int, scatter: Scatter) -> None:
        self.reader, self.batches, self.workers, self.scatter = reader, batches, workers, scatter

    def begin_at(self, first: int) -> None:
        """Set the first batch of each worker that is read of the next epoch."""
        self.batches.first = first
        if self.reader is not None:
            self.reader.begin_at(first * self.workers)

    def __iter__(self) -> Iterator[tuple[Inputs, torch.Tensor]]:
        read = iter(self.reader) if self.reader is not None else None
        for _ in range(len(self.batches)):
            yield self.scatter([next(read) for _ in range(self.workers)] if read is not None else None)

    def close(self) -> None:
        """End the reading processes of the first worker, which reads for all."""
        if self.reader is not None:
            self.reader.close()


class BlockReader:
    """Reads batches of a map-style data set by lists of indices, one list after another, for leased blocks."""

    def __init__(self, dataset: Dataset[Any], reading: Reading) -> None:
        self.addresses: list[tuple[int, np.ndarray]] = []
        self.reader = Reader(dataset, self.addresses, reading)  # type: ignore[arg-type]

    def __call__(self, epoch: int, batches: list[np.ndarray]) -> Iterator[tuple[Inputs, torch.Tensor]]:
        """These batches of that epoch."""
        self.addresses[:] = [(epoch, indices) for indices in batches]
        return iter(self.reader)

    def close(self) -> None:
        """End the reading processes of this reader of leased blocks."""
        self.reader.close()
