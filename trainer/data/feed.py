"""Feeds batches from the sampler to the device, grouped into updates, and measures how long the loop waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer.data.batch_inputs import Inputs, each
from trainer.data.batch_reordering import Rewind
from trainer.data.evaluated_split import TEST, VAL, EvaluatedSplit
from trainer.data.placement import Placement
from trainer.data.reader import IN_THIS_PROCESS, Addresses, InOrder, Reader, Reading, Scatter, read_scattered
from trainer.data.sampler import EvaluationSampler, TrainingSampler
from trainer.data.source import Splits
from trainer.host.transfers import IdleTime

if TYPE_CHECKING:
    from trainer.data.auto_num_workers import Growth
    from trainer.data.images.encoded import DeviceDecoder
    from trainer.data.leased_blocks import LeasedBatches, LeasedRows

BY_SAMPLES = -1.0
"""Denominator of a batch whose loss is the mean over its samples."""


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
        on_host: the inputs as they were read, for a strategy that needs their ids on the host; None: the inputs are
            there, or no strategy needs them.
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
    on_host: Inputs | None = None

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
        limit_train, limit_val: greatest number of batches of an epoch, and of an evaluation; None: all.
        expect: called with each batch before its predecessor is yielded; None: no batch is read ahead.
        work: hands out the epoch's blocks; None: the sampler has split them.
        scatter: with data.read=scatter the strategy's; None: each worker reads its own batches.
        growth: decides whether more processes read; None: their number is fixed.
        test: the sampler of the test data; None: there is no test.
        decoder: decodes training batches on the device; None: they come decoded.
        denominator: labels (N,) of a batch on the CPU -> what its mean loss is divided by; None: its samples.
        outputs: label of the evaluation data -> index of the model's output for that class; empty: the label itself.
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
        reading: Reading = IN_THIS_PROCESS,
        limit_train: int | None = None,
        limit_val: int | None = None,
        expect: Callable[[Batch], None] | None = None,
        work: LeasedBatches | LeasedRows | None = None,
        scatter: Scatter | None = None,
        growth: Growth | None = None,
        test: EvaluationSampler | None = None,
        outputs: Sequence[int] = (),
        denominator: Callable[[torch.Tensor], float] | None = None,
        decoder: DeviceDecoder | None = None,
    ) -> None:
        self.sampler = train
        self.growth = growth
        self.decoder = decoder
        self.expect = expect
        self.work = work
        self.place = place
        self.merge = merge
        self.average = average
        self.denominator = denominator
        self.streams = isinstance(splits.train, InOrder)
        self.limit_train, self.scatter = limit_train, scatter
        self.reader: Reader | None = getattr(work, "reader", None)
        if self.reader is None and (scatter is None or train.rank == 0):
            self.reader = Reader(splits.train, reading)
        plain = replace(reading, mixing=None)
        self.evaluated = {VAL: EvaluatedSplit(splits.val, val, limit_val, plain, place, outputs)}
        if test is not None:
            self.evaluated[TEST] = EvaluatedSplit(splits.test, test, limit_val, plain, place, outputs)
        self.waited = 0.0
        self.idle = IdleTime(place.device) if growth is not None and place.device.type == "cuda" else None

    def updates(self, epoch: int, first: int = 0) -> Iterator[tuple[int, Iterator[Batch]]]:
        """Yield the epoch's updates from number ``first`` on: how many samples this worker has in it, and its batches.

        With leased work these are the updates of the blocks that this worker still gets in the epoch. ``waited`` grows
        by the seconds that the loop waits for data. The number of reading processes is judged by the time that a GPU
        has nothing to do meanwhile, and on a CPU by ``waited``.
        """
        if self.growth is not None:
            self.growth.epoch_begins()
        batches = self._one_ahead(self._leased(epoch) if self.work is not None else self._split(epoch, first))
        for batch in batches:
            yield batch.update, _until_last(batch, batches)
            if self.growth is not None:
                self._grow(self.growth.updated(self._idle_seconds()))
        if self.growth is not None:
            self._grow(self.growth.epoch_over(self._idle_seconds()))

    def _idle_seconds(self) -> float:
        return self.waited if self.idle is None else self.idle.seconds()

    def _grow(self, readers: int | None) -> None:
        """Read with this number of reading processes from now on; None: no change."""
        if readers is None or self.growth is None:
            return
        unused = (split.reader for split in self.evaluated.values() if split.reader.loader is None)
        for one in (self.reader, *unused):
            if one is not None:
                one.grow(readers, self.growth.prefetch(readers))

    def _split(self, epoch: int, update: int) -> Iterator[Batch | None]:
        """The batches that the sampler gives this worker, from an update on."""
        self.sampler.set_epoch(epoch)
        sizes = self.sampler.sizes()[: self.limit_train]
        first = update * self.merge
        if first and self.sampler.rank == 0 and self.streams:
            skipped = sum(stop - start for start, stop, _ in islice(self.sampler.global_batches(), first))
            print(
                (
                    f"epoch {epoch}: the stream is read from its beginning, and {skipped} samples that were "
                    f"trained on are skipped"
                ),
                flush=True,
            )
        if self.scatter is not None:
            read = read_scattered(self.reader, self.sampler, self.limit_train, first, self.scatter)
        else:
            assert self.reader is not None
            read = self.reader.read(Addresses(self.sampler, self.limit_train, first))
        batches = self._timed(read)
        for start in range(first, len(sizes), self.merge):
            yield from self._batches(batches, sizes[start : start + self.merge])

    def _batches(self, batches: Iterator[tuple[Inputs, torch.Tensor]], group: list[int]) -> Iterator[Batch]:
        """The batches of an update; ``group``: of each batch the number of samples that count.

        A batch's share of the update must be known before its forward. If the denominators depend on the labels, all
        batches of the update are read first.
        """
        denominators = [float(samples) for samples in group]
        if self.denominator is not None:
            read = [next(batches) for _ in group]
            denominators = [self.denominator(labels) if n else 0.0 for (_, labels), n in zip(read, group, strict=True)]
            batches = iter(read)
        whole, factor = sum(denominators), 1 if self.average else len(group)
        for number, (samples, denominator) in enumerate(zip(group, denominators, strict=True)):
            read_inputs, read_labels = next(batches)
            inputs, labels = self.place(read_inputs, read_labels)
            share = factor * denominator / whole if denominator else 0.0
            last = number == len(group) - 1
            on_host = None if self.expect is None else read_inputs
            yield Batch(inputs, labels, samples, share, last, sum(group), None, denominator, whole, on_host)

    def _leased(self, epoch: int) -> Iterator[Batch | None]:
        """The batches of the blocks that this worker leases; None: yield the batch that is held back."""
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
        """Yield the same batches, each after ``expect`` was called with the next one; None: do not wait for that."""
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
        for numbers, inputs, labels, read in self.evaluated[split].batches(index, count):
            yield numbers, Batch(inputs, labels, len(numbers), denominator=self._denominator(read))

    def _denominator(self, labels: torch.Tensor) -> float:
        return BY_SAMPLES if self.denominator is None else self.denominator(labels.cpu())

    def reorder(self, rewinds: Sequence[Rewind]) -> None:
        """Reorder the training batches of some epochs (:mod:`trainer.data.batch_reordering`)."""
        self.sampler.reorder(rewinds, self.merge, self.limit_train)

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
        if self.scatter is not None or self.reader is None:
            raise LookupError("the first worker reads for all")
        inputs, labels = self.place(*self._at(epoch, address))
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
        """The file of each of these samples of a split; '' if it is not known."""
        return self.evaluated[split].files_of(numbers)

    def example(self) -> Inputs:
        """The inputs of one sample as the data source gives them, on the CPU, from the validation data if there are
        any."""
        if self.evaluated[VAL].has_numbers:
            return self.validation_inputs([0])
        assert self.reader is not None
        return each(torch.Tensor.cpu, self._at(0, np.array([0]))[0])

    def _at(self, epoch: int, address: np.ndarray) -> tuple[Inputs, torch.Tensor]:
        """The training batch at an address, read in this process."""
        assert self.reader is not None
        batch = self.reader.dataset.__getitems__((epoch, address))
        return batch if self.decoder is None else next(self.decoder.ahead(iter([batch])))

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        batches = batches if self.decoder is None else self.decoder.ahead(batches)
        while True:
            start = time.perf_counter()
            with nullcontext() if self.idle is None else self.idle.around():
                batch = next(batches, None)
            self.waited += time.perf_counter() - start
            if batch is None:
                return
            yield batch

    def close(self) -> None:
        """End the reading processes of training and evaluations."""
        for reader in (self.reader, *(split.reader for split in self.evaluated.values())):
            if reader is not None:
                reader.close()
        if self.decoder is not None:
            self.decoder.close()


def _until_last(batch: Batch, batches: Iterator[Batch]) -> Iterator[Batch]:
    """A batch and those after it that belong to the same update."""
    yield batch
    while not batch.last:
        batch = next(batches)
        yield batch
