"""Feeds batches from the sampler to the device, grouped into updates, and measures how long the loop waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer.data.batch_inputs import Inputs
from trainer.data.batch_reordering import Rewind
from trainer.data.evaluated_split import TEST, VAL, EvaluatedSplit
from trainer.data.placement import Placement
from trainer.data.reader import HERE, Addresses, BlockReader, InOrder, Reader, Reading, Scatter, ScatteredReader
from trainer.data.sampler import EvaluationSampler, EverybodysBatches, TrainingSampler
from trainer.data.source import Splits

if TYPE_CHECKING:
    from trainer.data.auto_num_workers import Growth
    from trainer.data.leased_blocks import MapWork, StreamWork

BY_SAMPLES = -1.0
"""For the denominator of a loss: the number of samples."""


@dataclass
class Batch:
    """One batch of inputs and labels on the device.

    Attributes:
        inputs: (N, ...), or several such by name; labels: (N,).
        samples: how many of the N count (all, except for a placeholder batch: 0).
        share: factor on the batch's mean loss within its update.
        denominator: what the batch's mean loss is divided by: its samples, or with class weights the sum of theirs.
        last: the update's last batch.
        update: this worker's samples in the whole update; update_denominator: the sum of the denominators.
        work: where work is leased: epoch, block, number in the block, and whether it is the block's last.
    """

    inputs: Inputs
    labels: torch.Tensor
    samples: int
    share: float = 1.0
    last: bool = True
    update: int = 0
    work: tuple[int, int, int, bool] | None = None
    denominator: float = BY_SAMPLES
    update_denominator: float = BY_SAMPLES

    def __post_init__(self) -> None:
        if self.denominator == BY_SAMPLES:
            self.denominator = float(self.samples)
        if self.update_denominator == BY_SAMPLES:
            self.update_denominator = float(self.update)


class Feed:
    """Feeds one worker's training batches, grouped into updates, and its evaluation batches to the device.

    Args:
        splits: the data sets.
        train, val: the samplers.
        place: moves a batch to the device.
        merge: batches per update (gradient merge); the epoch's last update may have fewer.
        average: the merged batches' gradients are averaged over samples; False: that times the number of batches,
            which for batches of equal size is their sum.
        reading: how samples are read.
        limit_train, limit_val: use only so many batches.
        expect: told of each batch before the one ahead of it is handed out; None: nothing is read ahead.
        work: hands out the epoch's blocks; None: the sampler has split them.
        scatter: the strategy's, where the first worker reads for all; None: each reads its own.
        growth: says whether more processes should read; None: they are as many as they are.
        test: the sampler of the test data; None: there are none to be measured.
        denominator: of the loss of a batch, from its labels on the CPU; None: its samples.
        outputs: for each label of the evaluation data, the model's output of that class; empty: the one of its number.
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
        reading: Reading = HERE,
        limit_train: int | None = None,
        limit_val: int | None = None,
        expect: Callable[[Batch], None] | None = None,
        work: MapWork | StreamWork | None = None,
        scatter: Scatter | None = None,
        growth: Growth | None = None,
        test: EvaluationSampler | None = None,
        outputs: Sequence[int] = (),
        denominator: Callable[[torch.Tensor], float] | None = None,
    ) -> None:
        self.sampler = train
        self.growth = growth
        self.expect = expect
        self.work = work
        self.place = place
        self.merge = merge
        self.average = average
        self.denominator = denominator
        self.streams = isinstance(splits.train, InOrder)
        self.train_addresses = Addresses(train, limit_train)
        self.train_reader: Reader | ScatteredReader
        if scatter is None:
            self.train_reader = Reader(splits.train, self.train_addresses, reading)
        else:
            limit = limit_train and limit_train * train.world_size
            all_of_them = Addresses(EverybodysBatches(train), limit)
            reads = Reader(splits.train, all_of_them, reading) if train.rank == 0 else None
            self.train_reader = ScatteredReader(reads, self.train_addresses, train.world_size, scatter)
        plain = replace(reading, mixing=None)
        self.evaluated = {VAL: EvaluatedSplit(splits.val, Addresses(val, limit_val), plain, place, outputs)}
        if test is not None:
            self.evaluated[TEST] = EvaluatedSplit(splits.test, Addresses(test, limit_val), plain, place, outputs)
        self.waited = 0.0

    def updates(self, epoch: int, first: int = 0) -> Iterator[tuple[int, Iterator[Batch]]]:
        """Yield the epoch's updates from number ``first`` on: how many samples this worker has in it, and its batches.

        Where work is leased, what is left of the epoch is handed out. ``waited`` grows by the seconds that the loop
        stood still for data.
        """
        batches = self._one_ahead(self._leased(epoch) if self.work is not None else self._split(epoch, first))
        for batch in batches:
            yield batch.update, _until_last(batch, batches)
            if self.growth is not None:
                self._grow(self.growth.updated(self.waited))
        if self.growth is not None:
            self._grow(self.growth.epoch_over(self.waited))

    def _grow(self, readers: int | None) -> None:
        """Go on with so many reading processes; None: as it is."""
        if readers is None or self.growth is None:
            return
        training = self._block_reader() or self.train_reader
        reader = training if isinstance(training, Reader) else training.reader
        unused = (split.reader for split in self.evaluated.values() if split.reader.loader is None)
        for one in (reader, *unused):
            if one is not None:
                one.grow(readers, self.growth.prefetch(readers))

    def _split(self, epoch: int, update: int) -> Iterator[Batch | None]:
        """The batches that the sampler gives this worker, from an update on."""
        self.sampler.set_epoch(epoch)
        sizes = self.sampler.sizes()[: self.train_addresses.of_epoch]
        first = update * self.merge
        if first and self.sampler.rank == 0 and self.streams:
            skipped = sum(stop - start for start, stop, _ in islice(self.sampler.cuts(), first))
            print(
                (
                    f"epoch {epoch}: the stream is read from its beginning, and {skipped} samples that were "
                    f"trained on are skipped"
                ),
                flush=True,
            )
        self.train_reader.begin_at(first)
        batches = self._timed(iter(self.train_reader))
        for start in range(first, len(sizes), self.merge):
            yield from self._batches(batches, sizes[start : start + self.merge])

    def _batches(self, batches: Iterator[tuple[Inputs, torch.Tensor]], group: list[int]) -> Iterator[Batch]:
        """The batches of an update, for each of which ``group`` has its samples that count.
        Their shares must be known before the first is computed: by samples they are, else the labels are read first."""
        denominators = [float(samples) for samples in group]
        if self.denominator is not None:
            read = [next(batches) for _ in group]
            denominators = [self.denominator(labels) if n else 0.0 for (_, labels), n in zip(read, group, strict=True)]
            batches = iter(read)
        whole, factor = sum(denominators), 1 if self.average else len(group)
        for number, (samples, denominator) in enumerate(zip(group, denominators, strict=True)):
            inputs, labels = self.place(*next(batches))
            share = factor * denominator / whole if denominator else 0.0
            last = number == len(group) - 1
            yield Batch(inputs, labels, samples, share, last, sum(group), None, denominator, whole)

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

    def evaluation(self, index: int, count: int, split: str = VAL) -> Iterator[tuple[np.ndarray, Batch]]:
        """Yield the batches of worker ``index`` of ``count`` of a split, each with its samples' indices."""
        for numbers, inputs, labels in self.evaluated[split].batches(index, count):
            yield numbers, Batch(inputs, labels, len(numbers), denominator=self._denominator(labels))

    def _denominator(self, labels: torch.Tensor) -> float:
        return BY_SAMPLES if self.denominator is None else self.denominator(labels.cpu())

    def reorder(self, rewinds: Sequence[Rewind]) -> None:
        """Reorder the training batches of some epochs (:mod:`trainer.data.batch_reordering`)."""
        self.sampler.reorder(rewinds, self.merge, self.train_addresses.limit)

    def numbers(self, epoch: int, batch: int) -> list[int] | None:
        """The sample indices of this worker's training batch ``batch`` of an epoch; None if work is leased."""
        address = self._address(epoch, batch)
        return None if address is None else (address % self.sampler.num_samples).tolist()

    def batch(self, epoch: int, batch: int) -> Batch:
        """Read this worker's training batch ``batch`` of an epoch again, in this process.

        Raises:
            LookupError: work is leased, so nobody knows which it was.
        """
        address = self._address(epoch, batch)
        if address is None:
            raise LookupError("the batch is not kept where work is leased")
        if not isinstance(self.train_reader, Reader):
            raise LookupError("the first worker reads for all")
        inputs, labels = self.place(*self.train_reader.dataset.__getitems__((epoch, address)))
        return Batch(inputs, labels, len(labels), denominator=self._denominator(labels))

    def _address(self, epoch: int, batch: int) -> np.ndarray | None:
        if self.work is not None:
            return None
        self.sampler.set_epoch(epoch)
        return next(islice(self.sampler.arrays(), batch, None))

    def validation_inputs(self, numbers: Sequence[int], split: str = VAL) -> Inputs:
        """The inputs of the samples of a split with these indices, as the data source gives them."""
        return self.evaluated[split].inputs(numbers)

    def files_of(self, numbers: Sequence[int], split: str = VAL) -> list[str]:
        """What the samples of a split with these indices were read from; '' where that is not known."""
        return self.evaluated[split].files_of(numbers)

    def example(self) -> Inputs:
        """The inputs of one sample as the data source gives them, from the validation data if there are any."""
        if self.evaluated[VAL].has_numbers:
            return self.validation_inputs([0])
        reader = self.train_reader if isinstance(self.train_reader, Reader) else self.train_reader.reader
        assert reader is not None
        inputs: Inputs = reader.dataset.__getitems__((0, np.array([0])))[0]
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
        """End the reading processes of training and evaluations."""
        self.train_reader.close()
        for split in self.evaluated.values():
            split.reader.close()
        if (blocks := self._block_reader()) is not None:
            blocks.close()

    def _block_reader(self) -> BlockReader | None:
        return getattr(self.work, "read_batches", None)


def _until_last(batch: Batch, batches: Iterator[Batch]) -> Iterator[Batch]:
    """A batch and those after it that belong to the same update."""
    yield batch
    while not batch.last:
        batch = next(batches)
        yield batch
