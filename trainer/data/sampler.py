"""Which worker sees which sample when: pure arithmetic from (seed, epoch, rank), without communication."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


class Order:
    """The epoch's order of the samples: each once, shuffled or as they are."""

    def __init__(self, num_samples: int, seed: int = 0, shuffle: bool = True) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle

    def __len__(self) -> int:
        """Addresses in an epoch."""
        return self.num_samples

    def __call__(self, epoch: int) -> np.ndarray:
        """(len,) addresses of that epoch: a sample's number, plus ``num_samples`` for each earlier use of it."""
        if self.shuffle:
            return np.random.default_rng((self.seed, epoch)).permutation(self.num_samples)
        return np.arange(self.num_samples)


class ClassBalanced(Order):
    """As many samples as there are, every class equally often, as far as that goes (they differ by one at most).

    A class's samples are used in turn, in a new order each time round; so a rare class's are repeated, each time with
    another augmentation, and a frequent class's take several epochs' turns.

    Args:
        labels: (N,) of the samples.
    """

    def __init__(self, labels: np.ndarray, seed: int = 0) -> None:
        super().__init__(len(labels), seed)
        self.members = [np.flatnonzero(labels == label) for label in np.unique(labels)]

    def __call__(self, epoch: int) -> np.ndarray:
        lots = np.random.default_rng((self.seed, epoch))
        share, rest = divmod(self.num_samples, len(self.members))
        extra = set(lots.permutation(len(self.members))[:rest].tolist())
        chosen = []
        for number, members in enumerate(self.members):
            wanted = share + (number in extra)
            rounds = [lots.permutation(members) + turn * self.num_samples for turn in range(-(-wanted // len(members)))]
            chosen.append(np.concatenate(rounds)[:wanted] if rounds else members[:0])
        return lots.permutation(np.concatenate(chosen))


class RepeatedAugmentation(Order):
    """Each of a part of the samples several times side by side, with different augmentation (Hoffer et al., 2020).

    An epoch has as many addresses as there are samples, so it sees one sample in ``repeats``; as in DeiT, a sample's
    copies come next to each other, and so to different workers.
    """

    def __init__(self, num_samples: int, repeats: int, seed: int = 0) -> None:
        super().__init__(num_samples, seed)
        self.repeats = repeats

    def __call__(self, epoch: int) -> np.ndarray:
        order = super().__call__(epoch)[: -(-self.num_samples // self.repeats)]
        copies = order[:, None] + self.num_samples * np.arange(self.repeats)[None, :]
        return copies.reshape(-1)[: self.num_samples]


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
        order: of the epoch's samples; None: each once, by ``seed`` and ``shuffle``.
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
        order: Order | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size} workers")
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.drop_last = drop_last
        self.pad = pad
        self.whole = order or Order(num_samples, seed, shuffle)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        self.epoch = epoch

    def order(self) -> np.ndarray:
        """The epoch's order of all samples, padded where that is asked for."""
        order = self.whole(self.epoch)
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
            yield self.share(order[batch * together : (batch + 1) * together], self.rank)

    def share(self, together: np.ndarray, rank: int) -> np.ndarray:
        """A worker's part of what all workers get; at least one sample, which then counts zero."""
        mine = together[rank :: self.world_size]
        return mine if len(mine) else together[:1]

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self.arrays())


class EverybodysBatches:
    """The batches of all workers in turn, for a worker that reads them all."""

    def __init__(self, sampler: DistributedBatchSampler) -> None:
        self.sampler = sampler

    @property
    def epoch(self) -> int:
        """Of the sampler."""
        return self.sampler.epoch

    def __len__(self) -> int:
        return len(self.sampler) * self.sampler.world_size

    def arrays(self) -> Iterator[np.ndarray]:
        """The batches' addresses as arrays: batch 0 of each worker, batch 1 of each, ..."""
        order, together = self.sampler.order(), self.sampler.world_size * self.sampler.batch_size
        for batch in range(len(self.sampler)):
            for rank in range(self.sampler.world_size):
                yield self.sampler.share(order[batch * together : (batch + 1) * together], rank)


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
