"""From sampler to device: reads batches, counts the time the loop waits for them, groups them into updates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from trainer.data.augment.mixing import Mixing
from trainer.data.augment.seeded import Seeded
from trainer.data.growth import Growth, Rest, end_processes
from trainer.data.inputs import Inputs, each
from trainer.data.placement import Placement
from trainer.data.reading import Told, as_it_is, from_processes, reading_process
from trainer.data.sampler import EvaluationSampler, EverybodysBatches, TrainingSampler
from trainer.data.shared_batches import SharedBatches
from trainer.data.source import Splits
from trainer.data.work import MapWork, StreamWork

Scatter = Callable[[list[tuple[Inputs, torch.Tensor]] | None], tuple[Inputs, torch.Tensor]]
"""The first worker gives everybody's batches by rank, the others None; each gets its own."""


@dataclass
class Batch:
    """One batch on the device.

    Attributes:
        inputs: (N, ...), or several such by name; labels: (N,).
        samples: how many of the N count (all, except for a placeholder batch: 0).
        share: factor on the batch's mean loss within its update.
        last: the update's last batch.
        update: this worker's samples in the whole update.
        work: where work is leased: epoch, block, number in the block, and whether it is the block's last.
    """

    inputs: Inputs
    labels: torch.Tensor
    samples: int
    share: float = 1.0
    last: bool = True
    update: int = 0
    work: tuple[int, int, int, bool] | None = None


class _Addresses:
    """A sampler's batches as (epoch, indices); limited to so many batches."""

    def __init__(self, sampler: TrainingSampler | EvaluationSampler | EverybodysBatches, limit: int | None) -> None:
        self.sampler = sampler
        self.limit = limit

    def __len__(self) -> int:
        return len(self.sampler) if self.limit is None else min(self.limit, len(self.sampler))

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        epoch = getattr(self.sampler, "epoch", 0)
        for _, batch in zip(range(len(self)), self.sampler.arrays(), strict=False):
            yield epoch, batch


class _Reader:
    """Batches of one data set in the sampler's order, in this process or in reading processes."""

    def __init__(
        self,
        dataset: Dataset[Any],
        addresses: _Addresses,
        seed: int,
        num_workers: int,
        pin_memory: bool,
        mixing: Mixing | None = None,
        prefetch: int = 2,
    ) -> None:
        self.dataset = Seeded(dataset, seed, mixing)
        self.addresses = addresses
        self.num_workers, self.prefetch = num_workers, prefetch
        self.pin_memory = pin_memory
        self.rest = Rest(addresses)
        self.loader: DataLoader[Any] | None = None
        self.shared: SharedBatches | None = None
        self.retired: DataLoader[Any] | None = None

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

    def grow(self, num_workers: int, prefetch: int) -> None:
        """From the next batch on, read by so many processes, which keep so many batches ready each."""
        self.num_workers, self.prefetch = num_workers, prefetch
        self.retired, self.loader = self.loader, None

    def _begin(self, first: int) -> Iterator[tuple[Inputs, torch.Tensor]]:
        """The epoch's batches from that one on; the processes stay for the next epoch."""
        if self.loader is None:
            shares = SharedBatches.possible() and not self.pin_memory  # what is pinned is copied anyway
            self.shared = SharedBatches(self.num_workers) if shares else None
            self.loader = DataLoader(
                Told(self.dataset, self.shared),
                batch_sampler=self.rest,  # type: ignore[arg-type]
                num_workers=self.num_workers,
                prefetch_factor=self.prefetch,
                collate_fn=as_it_is,
                pin_memory=self.pin_memory,
                persistent_workers=True,
                worker_init_fn=reading_process,
            )
        self.rest.first = first
        batches = from_processes(iter(self.loader), self.shared)
        end_processes(self.retired)
        self.retired = None
        return batches

    def close(self) -> None:
        """End the reading processes."""
        for loader in (self.loader, self.retired):
            end_processes(loader)
        self.loader = self.retired = None


class ScatteredReader:
    """The first worker reads everybody's batches and sends each its own, which are those that it would have read.

    Args:
        reader: of everybody's batches, on the first worker; None on the others.
        batches: (addresses) of this worker.
        workers: how many there are.
        scatter: the strategy's.
    """

    def __init__(self, reader: _Reader | None, batches: _Addresses, workers: int, scatter: Scatter) -> None:
        self.reader, self.batches, self.workers, self.scatter = reader, batches, workers, scatter

    def __iter__(self) -> Iterator[tuple[Inputs, torch.Tensor]]:
        read = iter(self.reader) if self.reader is not None else None
        for _ in range(len(self.batches)):
            yield self.scatter([next(read) for _ in range(self.workers)] if read is not None else None)

    def close(self) -> None:
        """End the reading processes."""
        if self.reader is not None:
            self.reader.close()


class BlockReader:
    """Batches of a map-style data set by any indices, one list of them after the other."""

    def __init__(
        self,
        dataset: Dataset[Any],
        seed: int,
        num_workers: int,
        pin_memory: bool,
        mixing: Mixing | None = None,
        prefetch: int = 2,
    ) -> None:
        self.addresses: list[tuple[int, np.ndarray]] = []
        self.reader = _Reader(dataset, self.addresses, seed, num_workers, pin_memory, mixing, prefetch)  # type: ignore[arg-type]

    def __call__(self, epoch: int, batches: list[np.ndarray]) -> Iterator[tuple[Inputs, torch.Tensor]]:
        """These batches of that epoch."""
        self.addresses[:] = [(epoch, indices) for indices in batches]
        return iter(self.reader)

    def close(self) -> None:
        """End the reading processes."""
        self.reader.close()


class Feed:
    """The training batches of one worker, grouped into updates, and the evaluation batches.

    Args:
        splits: the data sets.
        train, val: the samplers.
        place: moves a batch to the device.
        merge: batches per update (gradient merge); the epoch's last update may have fewer.
        average: the merged batches' gradients are averaged over samples; False: that times the number of batches,
            which for batches of equal size is their sum.
        seed: of the augmentation.
        num_workers: reading processes; prefetch: batches that each of them keeps ready.
        pin_memory: page-locked batches.
        limit_train, limit_val: use only so many batches.
        expect: told of each batch before the one ahead of it is handed out; None: nothing is read ahead.
        work: hands out the epoch's blocks; None: the sampler has split them.
        mixing: of training batches.
        scatter: the strategy's, where the first worker reads for all; None: each reads its own.
        growth: says whether more processes should read; None: they are as many as they are.
    """

    def __init__(
        self,
        splits: Splits,
        train: TrainingSampler,
        val: EvaluationSampler,
        place: Placement,
        *,
        merge: int = 1,
        average: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
        limit_train: int | None = None,
        limit_val: int | None = None,
        expect: Callable[[Batch], None] | None = None,
        work: MapWork | StreamWork | None = None,
        mixing: Mixing | None = None,
        scatter: Scatter | None = None,
        growth: Growth | None = None,
    ) -> None:
        self.sampler = train
        self.growth = growth
        self.expect = expect
        self.work = work
        self.block_reader: BlockReader | None = None
        self.place = place
        self.merge = merge
        self.average = average
        self.train_addresses = _Addresses(train, limit_train)
        everything = (seed, num_workers, pin_memory, mixing, prefetch)
        self.train_reader: _Reader | ScatteredReader
        if scatter is None:
            self.train_reader = _Reader(splits.train, self.train_addresses, *everything)
        else:
            limit = limit_train and limit_train * train.world_size
            all_of_them = _Addresses(EverybodysBatches(train), limit)
            reads = _Reader(splits.train, all_of_them, *everything) if train.rank == 0 else None
            self.train_reader = ScatteredReader(reads, self.train_addresses, train.world_size, scatter)
        self.val_addresses = _Addresses(val, limit_val)
        self.val_reader = _Reader(splits.val, self.val_addresses, seed, num_workers, pin_memory, None, prefetch)
        self.waited = 0.0

    def updates(self, epoch: int) -> Iterator[tuple[int, Iterator[Batch]]]:
        """For each update of the epoch: this worker's samples in it, and its batches.

        ``waited`` grows by the seconds that the loop stood still for data.
        """
        batches = self._one_ahead(self._leased(epoch) if self.work is not None else self._split(epoch))
        for first in batches:
            yield first.update, _until_last(first, batches)
            if self.growth is not None:
                self._grow(self.growth.updated(self.waited))
        if self.growth is not None:
            self._grow(self.growth.epoch_over(self.waited))

    def _grow(self, readers: int | None) -> None:
        """Go on with so many reading processes; None: as it is."""
        if readers is None or self.growth is None:
            return
        training = self.block_reader or self.train_reader
        reader = training if isinstance(training, _Reader) else training.reader
        for one in (reader, self.val_reader if self.val_reader.loader is None else None):
            if one is not None:
                one.grow(readers, self.growth.prefetch(readers))

    def _split(self, epoch: int) -> Iterator[Batch | None]:
        """The batches that the sampler gives this worker."""
        self.sampler.set_epoch(epoch)
        sizes = self.sampler.sizes()[: len(self.train_addresses)]
        batches = self._timed(iter(self.train_reader))
        for start in range(0, len(sizes), self.merge):
            yield from self._batches(batches, sizes[start : start + self.merge])

    def _batches(self, batches: Iterator[tuple[Inputs, torch.Tensor]], group: list[int]) -> Iterator[Batch]:
        factor = 1 if self.average else len(group)
        for number, samples in enumerate(group):
            inputs, labels = self.place(*next(batches))
            share = factor * samples / sum(group) if samples else 0.0
            yield Batch(inputs, labels, samples, share, number == len(group) - 1, sum(group))

    def _leased(self, epoch: int) -> Iterator[Batch | None]:
        """The batches of the blocks that are handed to this worker; None: hand out what is held back."""
        assert self.work is not None
        for lease in self.work.leases(epoch):
            if lease is None:
                yield None
                continue
            number, batches = lease.start, self._timed(self.work.read(epoch, lease))
            group, after = [], next(batches, None)
            if after is None:
                lease.empty()
            while after is not None:
                group.append(after)
                after = next(batches, None)
                if len(group) < self.merge and after is not None:
                    continue
                for batch in self._batches(iter(group), [len(labels) for _, labels in group]):
                    batch.work = epoch, lease.block, number, batch.last and after is None
                    number += 1
                    yield batch
                group = []

    def _one_ahead(self, batches: Iterator[Batch | None]) -> Iterator[Batch]:
        """The same batches; each is announced before the one ahead of it is handed out."""
        held: Batch | None = None
        for batch in batches:
            if batch is not None and self.expect is not None and held is not None:
                self.expect(batch)
            if held is not None:
                yield held
            held = batch
            if self.expect is None and held is not None:
                yield held
                held = None
        if held is not None:
            yield held

    def evaluation(self, index: int, count: int) -> Iterator[tuple[np.ndarray, Batch]]:
        """The evaluation batches of the worker with that number of so many that take part, and their samples' numbers."""
        self.val_addresses.sampler = self.val_addresses.sampler.of(index, count)  # type: ignore[union-attr]
        for (_, numbers), (inputs, labels) in zip(self.val_addresses, self.val_reader, strict=True):
            inputs, labels = self.place(inputs, labels)
            yield numbers, Batch(inputs, labels, len(labels))

    def validation_inputs(self, numbers: Sequence[int]) -> Inputs:
        """The inputs of these validation samples, as the data source gives them."""
        inputs: Inputs = self.val_reader.dataset.__getitems__((0, np.array(numbers, dtype=np.int64)))[0]
        return inputs

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - start
            if batch is None:
                return
            yield batch

    def close(self) -> None:
        """End the reading processes."""
        self.train_reader.close()
        self.val_reader.close()
        if self.block_reader is not None:
            self.block_reader.close()


def _until_last(batch: Batch, batches: Iterator[Batch]) -> Iterator[Batch]:
    """A batch and those after it that belong to the same update."""
    yield batch
    while not batch.last:
        batch = next(batches)
        yield batch
