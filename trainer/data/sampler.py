"""Which worker sees which sample when: pure arithmetic from (seed, epoch, rank), without communication."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


class DistributedBatchSampler:
    """Batches of indices for one worker; over all workers together they are the global batches of one process.

    Update ``s`` of all ``world_size`` workers together is ``order[s * world_size * batch_size:][:world_size *
    batch_size]`` of the epoch's order, so that N workers see what one worker with an N times larger batch sees.

    Args:
        num_samples: samples in the data set.
        batch_size: samples per worker and batch.
        rank, world_size: this worker among all.
        shuffle: a new order each epoch, from (seed, epoch).
        drop_last: leave out the last batch when it is not full.
        pad: repeat samples from the start of the order so that all workers get equally many; False: the last batch
            may differ by one sample between workers, and a worker that gets none is given one that counts zero.
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
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size} workers")
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.pad = pad
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        self.epoch = epoch

    def order(self) -> np.ndarray:
        """The epoch's order of all samples, padded where that is asked for."""
        if self.shuffle:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(self.num_samples)
        else:
            order = np.arange(self.num_samples)
        missing = -self.num_samples % self.world_size if self.pad else 0
        return np.concatenate([order, np.resize(order, missing)]) if missing else order

    def __len__(self) -> int:
        """Batches per epoch, the same for all workers."""
        samples = self.num_samples + (-self.num_samples % self.world_size if self.pad else 0)
        whole, rest = divmod(samples, self.world_size * self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def sizes(self) -> list[int]:
        """Samples that count in each of this worker's batches."""
        samples = self.num_samples + (-self.num_samples % self.world_size if self.pad else 0)
        sizes = []
        for batch in range(len(self)):
            left = min(samples - batch * self.world_size * self.batch_size, self.world_size * self.batch_size)
            sizes.append(max(0, -(-(left - self.rank) // self.world_size)))
        return sizes

    def arrays(self) -> Iterator[np.ndarray]:
        """The batches' indices as arrays."""
        order, together = self.order(), self.world_size * self.batch_size
        for batch in range(len(self)):
            chunk = order[batch * together : (batch + 1) * together]
            mine = chunk[self.rank :: self.world_size]
            yield mine if len(mine) else chunk[:1]

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self.arrays())


class EvaluationSampler:
    """Every sample exactly once over all workers, in batches; workers may have different numbers of them."""

    def __init__(self, num_samples: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.num_samples = num_samples
        self.mine = np.arange(num_samples)[rank::world_size]
        self.batch_size = batch_size

    def of(self, rank: int, world_size: int) -> EvaluationSampler:
        """The same samples, the share of another worker."""
        return EvaluationSampler(self.num_samples, self.batch_size, rank, world_size)

    def __len__(self) -> int:
        return -(-len(self.mine) // self.batch_size)

    def arrays(self) -> Iterator[np.ndarray]:
        """The batches' indices as arrays."""
        for start in range(0, len(self.mine), self.batch_size):
            yield self.mine[start : start + self.batch_size]

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self.arrays())
