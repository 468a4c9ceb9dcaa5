"""Reads the batches of a data set in a sampler's order, in this process or in reading processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from trainer.data.augment.seeded import Seeded
from trainer.data.batch_inputs import Inputs, pinned
from trainer.data.sampler import AllWorkersBatches, EvaluationSampler, TrainingSampler

if TYPE_CHECKING:
    from trainer.data.augment.mixing import Mixing
    from trainer.data.shared_batches import SharedBatches

Scatter = Callable[[list[tuple[Inputs, torch.Tensor]] | None], tuple[Inputs, torch.Tensor]]
"""Called with the batches of all workers by rank on the first worker, else with None; returns this worker's batch."""


class InOrder(Dataset[Any]):
    """Base class of data sets that are read by rising positions only (:class:`trainer.data.streamed.Streamed`)."""

    def shares(self, index: int, count: int, size: int) -> Iterator[tuple[np.ndarray, tuple[Inputs, torch.Tensor]]]:
        """Yield the evaluation batches of worker ``index`` of ``count``, each with its samples' numbers."""
        raise NotImplementedError


class Addresses:
    """A sampler's batches of its current epoch as (epoch, indices (N,)): from batch ``first`` on, up to ``limit``."""

    def __init__(
        self, sampler: TrainingSampler | EvaluationSampler | AllWorkersBatches, limit: int | None = None, first: int = 0
    ) -> None:
        self.sampler, self.first = sampler, first
        self.stop = len(sampler) if limit is None else min(limit, len(sampler))

    def __len__(self) -> int:
        return max(0, self.stop - self.first)

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        epoch = getattr(self.sampler, "epoch", 0)
        for batch in islice(self.sampler.arrays(), self.first, self.stop):
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


IN_THIS_PROCESS = Reading()
"""In this process, each batch when it is needed."""


class Pending:
    """The ``batch_sampler`` of a Reader's DataLoader: the addresses of one pass, without the first ``first``."""

    def __init__(self) -> None:
        self.addresses: Iterable[Any] = ()
        self.first = 0

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.addresses), self.first, None)


class Reader:
    """Reads batches of one data set by their addresses, in this process or in reading processes.

    Reading processes start with the first batch and stay for later passes. ``grow`` sets the DataLoader aside: the next
    batch comes from a new one with more processes, which goes on at the batch where the old one stopped. The old
    processes end only then, so batches that they have sent stay valid. The order of batches does not depend on any of
    this.
    """

    def __init__(self, dataset: Dataset[Any] | None, reading: Reading) -> None:
        self.dataset = Seeded(dataset, reading.seed, reading.mixing)
        self.num_workers, self.prefetch, self.pin_memory = reading.num_workers, reading.prefetch, reading.pin_memory
        self.pending = Pending()
        self.loader: DataLoader[Any] | None = None
        self.shared: SharedBatches | None = None
        self.retired: DataLoader[Any] | None = None
        self.seeds = torch.Generator().manual_seed(reading.seed)
        """Seeds the processes, so that reading takes no number of the training's generator."""

    def read(self, addresses: Addresses | Sequence[tuple[int, np.ndarray]]) -> Iterator[tuple[Inputs, torch.Tensor]]:
        """Read the batches at these addresses (epoch, indices (N,)), in this order."""
        if not self.num_workers:
            for address in addresses:
                inputs, labels = self.dataset.__getitems__(address)
                yield pinned((inputs, labels)) if self.pin_memory else (inputs, labels)
            return
        self.pending.addresses = addresses
        batches = self._begin(0)
        for done in range(len(addresses)):
            if self.loader is None:
                batches = self._begin(done)
            yield next(batches)

    def grow(self, num_workers: int, prefetch: int) -> None:
        """From the next batch on, read with ``num_workers`` processes that keep ``prefetch`` batches ready each."""
        self.num_workers, self.prefetch = num_workers, prefetch
        self.retired, self.loader = self.loader, None

    def _begin(self, first: int) -> Iterator[tuple[Inputs, torch.Tensor]]:
        """The pending batches from number ``first`` on."""
        # a reader without processes imports none of these
        from trainer.data.reading_processes import ReaderDataset, as_it_is, from_processes, reading_process
        from trainer.data.shared_batches import SharedBatches

        if self.loader is None:
            self.shared = SharedBatches(self.num_workers, self.pin_memory) if SharedBatches.possible() else None
            self.loader = DataLoader(
                ReaderDataset(self.dataset, self.shared),
                batch_sampler=self.pending,  # type: ignore[arg-type]
                num_workers=self.num_workers,
                prefetch_factor=self.prefetch,
                collate_fn=as_it_is,
                pin_memory=self.pin_memory and self.shared is None,
                persistent_workers=True,
                worker_init_fn=reading_process,
                generator=self.seeds,
            )
        self.pending.first = first
        batches = from_processes(iter(self.loader), self.shared)
        self._retire()
        return batches

    def _retire(self) -> None:
        """End the processes of the DataLoader that was set aside."""
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


def read_scattered(
    reader: Reader | None, sampler: TrainingSampler, limit: int | None, first: int, scatter: Scatter
) -> Iterator[tuple[Inputs, torch.Tensor]]:
    """data.read=scatter: the first worker reads the batches of all workers and sends each worker its own.

    Args:
        reader: on the first worker; None on the others.
        limit, first: batches of each worker in an epoch, and the first that is read.
    """
    workers, read = sampler.world_size, None
    if reader is not None:
        read = reader.read(Addresses(AllWorkersBatches(sampler), limit and limit * workers, first * workers))
    for _ in range(len(Addresses(sampler, limit, first))):
        yield scatter([next(read) for _ in range(workers)] if read is not None else None)
