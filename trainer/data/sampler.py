"""Decides which worker sees which sample when: pure arithmetic from (seed, epoch, rank), without communication."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from trainer.config.run_config import RunConfig
from trainer.data.batch_reordering import Rewind, reordered
from trainer.data.epoch_order import EpochOrder, epoch_order
from trainer.data.sample_orders import EachOnce

CONTIGUOUS = "contiguous"
PADDINGS = ("strided", CONTIGUOUS)


class UnshardedOrder(EpochOrder):
    """sampler.shard=false: every worker reads all samples of an order, with augmentation of its own.

    Args:
        rank: the worker; its addresses lie beyond those of the workers before it.
    """

    def __init__(self, order: EpochOrder, rank: int) -> None:
        super().__init__(order.samples)
        self.whole, self.beyond = order, rank * order.samples

    def __call__(self, epoch: int) -> np.ndarray:
        return self.whole(epoch) + self.beyond


class TrainingSampler(ABC):
    """Base class of the training samplers: one worker's batches of indices, its shares of the global batches.

    Args:
        num_samples: samples in the data set.
        rank, world_size: this worker among all.
        shuffle: a new order each epoch, from (seed, epoch).
        order: of the epoch's samples; None: each once, by ``seed`` and ``shuffle``.
    """

    def __init__(
        self, num_samples: int, rank: int, world_size: int, seed: int, shuffle: bool, order: EpochOrder | None
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size} workers")
        self.num_samples = num_samples
        self.rank = rank
        self.world_size = world_size
        self.whole = order or EpochOrder(num_samples, seed, EachOnce(shuffle))
        self.epoch = 0
        self.rewinds: tuple[Rewind, ...] = ()
        self.reordered_batches = 1, len(self.whole)

    def reorder(self, rewinds: Sequence[Rewind], merge: int, limit: int | None) -> None:
        """Reorder the batches of some epochs (:mod:`trainer.data.batch_reordering`).

        Args:
            merge: batches of an update; limit: batches of an epoch that are used; None: all.
        """
        self.rewinds = tuple(rewinds)
        self.reordered_batches = merge, len(self) if limit is None else min(limit, len(self))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order is used next."""
        self.epoch = epoch

    def order(self) -> np.ndarray:
        """The sample addresses of the current epoch in order, over all workers."""
        return self.whole(self.epoch)

    @abstractmethod
    def __len__(self) -> int:
        """Batches per epoch, the same for all workers."""

    def global_batches(self) -> Iterator[tuple[int, int, int]]:
        """The global batches of the epoch, reordered as :meth:`reorder` has asked for."""
        if not self.rewinds:
            return self.global_batches_in_order()
        cuts, (merge, used) = list(self.global_batches_in_order()), self.reordered_batches
        return iter([*reordered(cuts[:used], merge, self.epoch, self.rewinds), *cuts[used:]])

    @abstractmethod
    def global_batches_in_order(self) -> Iterator[tuple[int, int, int]]:
        """For each global batch (start, stop, first): its range in the epoch's order, the worker of its first sample.
        The next worker gets the next sample, and so on in turn."""

    def share(self, start: int, stop: int, first: int, rank: int) -> range:
        """The positions in the epoch's order of the samples of worker ``rank`` that count, in one global batch."""
        return range(start + (rank - first) % self.world_size, stop, self.world_size)

    def sizes(self) -> list[int]:
        """For each of this worker's batches, the number of samples that count."""
        return [len(self.share(*cut, self.rank)) for cut in self.global_batches()]

    def arrays(self) -> Iterator[np.ndarray]:
        """Yield this worker's batches as arrays of indices."""
        return (share for shares in self.shares_of([self.rank]) for share in shares)

    def shares_of(self, ranks: Sequence[int]) -> Iterator[list[np.ndarray]]:
        """For each global batch, the shares of these workers; a share without samples has one that counts zero."""
        order = self.order()
        for cut in self.global_batches():
            shares = [self.share(*cut, rank) for rank in ranks]
            yield [order[s.start : s.stop : s.step] if s else order[cut[0] : cut[0] + 1] for s in shares]

    def even(self, merge: int, limit: int | None = None) -> bool:
        """Whether all workers get equally many samples in each update of ``merge`` batches, up to ``limit`` batches."""
        cuts = list(self.global_batches())[:limit]
        sizes = [sum(stop - start for start, stop, _ in cuts[i : i + merge]) for i in range(0, len(cuts), merge)]
        return not any(size % self.world_size for size in sizes)

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self.arrays())


class DistributedBatchSampler(TrainingSampler):
    """data.batch_size: batches of that many samples for each worker, as many batches as the data allow.

    Batch ``s`` of all ``world_size`` workers together is ``order[s * world_size * batch_size:][:world_size *
    batch_size]`` of the epoch's order, so that N workers see what one worker with an N times larger batch sees.

    ``padding="strided"`` pads and splits as PyTorch's ``DistributedSampler``: the epoch's order goes on with its own
    start, and a worker has every ``world_size``-th sample of the batch. ``"contiguous"`` does as PaddlePaddle's
    ``DistributedBatchSampler``: the data go on with sample 0, 1, ... and are shuffled then, and a worker has one block
    of the batch. So its epoch's order follows from the number of workers, too.

    Args:
        num_samples: samples in the data set.
        batch_size: samples per worker and batch.
        rank, world_size: this worker among all.
        shuffle: a new order each epoch, from (seed, epoch).
        drop_last: leave out the last batch when it is not full.
        pad: repeat samples from the start of the order so that all workers get equally many; False: the last batch
            may differ by one sample between workers, and a worker that gets none is given one that counts zero.
        order: of the epoch's samples; None: each once, by ``seed`` and ``shuffle``.
        padding: ``strided`` or ``contiguous``; the latter has no other ``order``.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        pad: bool = True,
        order: EpochOrder | None = None,
        padding: str = "strided",
    ) -> None:
        if padding not in PADDINGS or (order and padding == CONTIGUOUS):
            raise ValueError(f"padding is {' or '.join(PADDINGS)}, and {CONTIGUOUS} has an order of its own")
        self.batch_size, self.drop_last, self.padding = batch_size, drop_last, padding
        length = num_samples if order is None else len(order)
        self.missing = -length % world_size if pad else 0
        self.padded_length = length + self.missing
        if padding == CONTIGUOUS:
            order = EpochOrder(self.padded_length, seed, EachOnce(shuffle))
        super().__init__(num_samples, rank, world_size, seed, shuffle, order)

    def order(self) -> np.ndarray:
        """The sample addresses of the current epoch in order, padded if the config asks for it."""
        order = super().order()
        if self.padding == CONTIGUOUS:
            return order % self.num_samples
        return np.concatenate([order, np.resize(order, self.missing)]) if self.missing else order

    def share(self, start: int, stop: int, first: int, rank: int) -> range:
        if self.padding != CONTIGUOUS:
            return super().share(start, stop, first, rank)
        begin, end = (start + (stop - start) * worker // self.world_size for worker in (rank, rank + 1))
        return range(begin, end)

    def __len__(self) -> int:
        whole, rest = divmod(self.padded_length, self.world_size * self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def global_batches_in_order(self) -> Iterator[tuple[int, int, int]]:
        together = self.world_size * self.batch_size
        return ((i * together, min((i + 1) * together, self.padded_length), 0) for i in range(len(self)))


class GlobalBatchSampler(TrainingSampler):
    """data.global_batch_size: updates of that many samples in total, the same samples for any number of workers.

    Update ``i`` is ``order[i * global_batch_size:][:global_batch_size]``, each sample once, cut into ``merge`` batches
    that differ by one sample at most. Sample ``j`` of an update goes to worker ``j % world_size``. The epoch's last
    update has what is left, in as many batches as that fills.

    Args:
        num_samples: samples in the data set.
        global_batch_size: samples per update, over all workers and merged batches; at least one for each.
        merge: batches per update.
        rank, world_size: this worker among all.
        shuffle: a new order each epoch, from (seed, epoch).
        drop_last: leave out the last update when it is not full.
        order: of the epoch's samples; None: each once, by ``seed`` and ``shuffle``.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch_size: int,
        merge: int = 1,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        order: EpochOrder | None = None,
    ) -> None:
        super().__init__(num_samples, rank, world_size, seed, shuffle, order)
        if global_batch_size < merge * world_size:
            raise ValueError(f"{global_batch_size} samples cannot be shared out over {merge * world_size} batches")
        self.global_batch_size = global_batch_size
        self.merge = merge
        self.drop_last = drop_last

    def __len__(self) -> int:
        whole, rest = divmod(len(self.whole), self.global_batch_size)
        return whole * self.merge + (0 if self.drop_last else self._batches(rest))

    def _batches(self, samples: int) -> int:
        """The number of batches of an update with ``samples`` samples."""
        return -(-samples * self.merge // self.global_batch_size)

    def global_batches_in_order(self) -> Iterator[tuple[int, int, int]]:
        for start in range(0, len(self.whole), self.global_batch_size):
            samples = min(self.global_batch_size, len(self.whole) - start)
            if self.drop_last and samples < self.global_batch_size:
                return
            batches = self._batches(samples)
            bounds = [samples * i // batches for i in range(batches + 1)]
            for begin, end in pairwise(bounds):
                yield start + begin, start + end, begin % self.world_size


class AllWorkersBatches:
    """Yields the batches of all workers in turn, for the one worker that reads for all (data.read=scatter)."""

    def __init__(self, sampler: TrainingSampler) -> None:
        self.sampler = sampler

    @property
    def epoch(self) -> int:
        """The epoch of the underlying sampler."""
        return self.sampler.epoch

    def __len__(self) -> int:
        return len(self.sampler) * self.sampler.world_size

    def arrays(self) -> Iterator[np.ndarray]:
        """Yield all workers' batches as arrays of indices: batch 0 of each worker, batch 1 of each, ..."""
        return (share for shares in self.sampler.shares_of(range(self.sampler.world_size)) for share in shares)


def training_sampler(
    config: RunConfig, samples: int, batch_size: int, rank: int, workers: int, order: EpochOrder | None = None
) -> TrainingSampler:
    """Make the training sampler of a run's config, by ``data.global_batch_size`` if set, else by batches per worker.

    Args:
        batch_size: samples per worker and batch, for the latter.
        order: of the epoch's samples; None where only the sizes of batches are asked for.
    """
    sampler, together, seed = config.sampler, config.data.global_batch_size, config.seed
    order = order or epoch_order(config, samples)
    if not sampler.shard and config.mode == "train":
        return DistributedBatchSampler(
            samples, batch_size, drop_last=sampler.drop_last, pad=False, order=UnshardedOrder(order, rank)
        )
    if together is None or config.mode != "train":
        return DistributedBatchSampler(
            samples,
            batch_size,
            rank,
            workers,
            seed,
            sampler.shuffle,
            sampler.drop_last,
            sampler.pad,
            None if sampler.padding == CONTIGUOUS else order,
            sampler.padding,
        )
    merge = config.strategy.gradient_merge.k_steps
    return GlobalBatchSampler(samples, together, merge, rank, workers, seed, sampler.shuffle, sampler.drop_last, order)


def undivided_sampler(
    config: RunConfig, samples: int, batch_size: int, order: EpochOrder | None = None
) -> DistributedBatchSampler:
    """Make the sampler of one worker that has the whole epoch, whose batches are leased in blocks."""
    order = order or epoch_order(config, samples)
    return DistributedBatchSampler(
        samples, batch_size, seed=config.seed, drop_last=config.sampler.drop_last, pad=False, order=order
    )


class EvaluationSampler:
    """Yields one worker's evaluation batches: over all workers, every sample exactly once; their counts may differ."""

    def __init__(self, num_samples: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.num_samples = num_samples
        self.indices = np.arange(num_samples)[rank::world_size]
        self.batch_size = batch_size

    def of(self, rank: int, world_size: int) -> EvaluationSampler:
        """The sampler of worker ``rank`` of ``world_size`` over the same samples."""
        return EvaluationSampler(self.num_samples, self.batch_size, rank, world_size)

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def arrays(self) -> Iterator[np.ndarray]:
        """Yield this worker's evaluation batches as arrays of indices."""
        for start in range(0, len(self.indices), self.batch_size):
            yield self.indices[start : start + self.batch_size]

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self.arrays())
