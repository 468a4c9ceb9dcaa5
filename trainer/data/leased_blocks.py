"""Blocks of an epoch's training data, which workers lease one after the other during the epoch.

The strategy decides which worker leases which block, and hands a block out again if its worker is lost. Here a lease is
turned into batches. A block has the same batches on every worker, because they follow from (seed, epoch, block) alone.
So another worker can go on in the middle, at batch ``start`` of the lease. A lease without a batch left is reported by
``empty``, because no push of the worker would release it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch

from trainer.data.batch_inputs import Inputs
from trainer.data.reader import Reader
from trainer.data.sampler import DistributedBatchSampler

Sample = tuple[Inputs, torch.Tensor]


class LeasedBlock(Protocol):
    """Protocol of a lease: the block's index, the first batch to read, and a call for a block without a batch left."""

    @property
    def block(self) -> int: ...

    @property
    def start(self) -> int: ...

    @property
    def empty(self) -> Callable[[], None]: ...


LeaseBlocks = Callable[[int, int], Iterator[Any]]
"""(epoch, number of blocks) -> the leases that this worker gets; None: yield what is held back first."""


class LeasedBatches:
    """Leased blocks of a map-style data set: a block is ``lease_batches`` batches of one process's epoch order.

    Args:
        reader: of the training data.
        sampler: of one worker that has all samples.
        lease_batches: batches in a block.
        limit: batches per epoch, over all workers.
        merge: batches of an update; a block holds whole updates.
        updates: greatest number of updates of the run, over all workers; None: no limit.
        lease_blocks: the strategy's ``leases``.
    """

    def __init__(
        self,
        reader: Reader,
        sampler: DistributedBatchSampler,
        lease_batches: int,
        limit: int | None,
        merge: int,
        updates: int | None,
        lease_blocks: LeaseBlocks,
    ) -> None:
        self.reader, self.sampler, self.lease_blocks = reader, sampler, lease_blocks
        self.lease_batches = -(-lease_batches // merge) * merge
        self.per_epoch = min(len(sampler), limit or len(sampler))
        self.merge, self.updates = merge, updates
        self._order: tuple[int, list[np.ndarray]] = (-1, [])

    def batches(self, epoch: int) -> int:
        """The number of batches in an epoch, over all workers."""
        if self.updates is None:
            return self.per_epoch
        left = self.updates - epoch * -(-self.per_epoch // self.merge)
        return max(0, min(self.per_epoch, left * self.merge))

    def leases(self, epoch: int) -> Iterator[Any]:
        """Yield the leases that this worker gets in an epoch."""
        return self.lease_blocks(epoch, -(-self.batches(epoch) // self.lease_batches))

    def read(self, epoch: int, lease: LeasedBlock) -> Iterator[Sample]:
        """Read the batches of a leased block, from the lease's first batch on."""
        if self._order[0] != epoch:
            self.sampler.set_epoch(epoch)
            self._order = epoch, list(self.sampler.arrays())
        first = lease.block * self.lease_batches
        last = min(first + self.lease_batches, self.batches(epoch))
        return self.reader.read([(epoch, indices) for indices in self._order[1][first + lease.start : last]])


class LeasedRows:
    """Leased blocks of a data set that is read block by block; (seed, epoch) shuffles the blocks, not their rows.

    Args:
        dataset: with ``blocks()`` and ``read_chunks(block)``. It may have ``left_out()``: a sentence for the
            end of an epoch.
        batch_size: rows of a batch; a block's last batch may have fewer.
        seed, shuffle: of the order of blocks.
        lease_blocks: the strategy's ``leases``.
    """

    def __init__(self, dataset: Any, batch_size: int, seed: int, shuffle: bool, lease_blocks: LeaseBlocks) -> None:
        self.dataset, self.batch_size, self.seed, self.shuffle, self.lease_blocks = (
            dataset,
            batch_size,
            seed,
            shuffle,
            lease_blocks,
        )

    def leases(self, epoch: int) -> Iterator[Any]:
        """Yield the leases that this worker gets in an epoch, then report the lines that could not be read."""
        yield from self.lease_blocks(epoch, self.dataset.blocks())
        if left_out := getattr(self.dataset, "left_out", str)():
            print(f"epoch {epoch}: {left_out}", flush=True)

    def read(self, epoch: int, lease: LeasedBlock) -> Iterator[Sample]:
        """Read the batches of a leased block, from the lease's first batch on."""
        order = np.arange(self.dataset.blocks())
        if self.shuffle:
            order = np.random.default_rng((self.seed, epoch)).permutation(len(order))
        skip = lease.start * self.batch_size
        rest: Sample | None = None
        for chunk in self.dataset.read_chunks(int(order[lease.block])):
            rest = chunk if rest is None else _joined(rest, chunk)
            while rest is not None and len(rest[1]) >= self.batch_size:
                head, rest = _cut(rest, self.batch_size)
                if skip:
                    skip -= self.batch_size
                else:
                    yield head
        if rest is not None and len(rest[1]) and not skip:
            yield rest


def _joined(one: Sample, other: Sample) -> Sample:
    inputs = (
        {name: torch.cat([one[0][name], other[0][name]]) for name in one[0]}
        if isinstance(one[0], dict) and isinstance(other[0], dict)
        else torch.cat([one[0], other[0]])  # type: ignore[list-item]
    )
    return inputs, torch.cat([one[1], other[1]])


def _cut(sample: Sample, size: int) -> tuple[Sample, Sample]:
    inputs, labels = sample
    if isinstance(inputs, dict):
        head: Inputs = {name: value[:size] for name, value in inputs.items()}
        tail: Inputs = {name: value[size:] for name, value in inputs.items()}
    else:
        head, tail = inputs[:size], inputs[size:]
    return (head, labels[:size]), (tail, labels[size:])
