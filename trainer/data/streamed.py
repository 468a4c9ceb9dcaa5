"""Streams of samples (an IterableDataset, or a function that returns an iterator), read by rising positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate

from trainer.data.augment.global_generators import own_randomness, seed_for_sample
from trainer.data.batch_inputs import Inputs
from trainer.data.checked_splits import check_labels, check_shape
from trainer.data.reader import InOrder
from trainer.data.source import Facts
from trainer.errors import RunFailed, UserError, failed, first_line

Batch = tuple[Inputs, torch.Tensor]


class Files(IterableDataset[Any]):
    """A stream of the samples in a list of files, one file after the other.

    Args:
        files: in their order; with data.shard=files, worker ``r`` of ``n`` reads ``files[r::n]``.
        read: called with a file, returns an iterable of its samples (input, label).
    """

    def __init__(self, files: Sequence[Any], read: Callable[[Any], Iterable[Any]]) -> None:
        self.files, self.read = list(files), read

    def __iter__(self) -> Iterator[Any]:
        for file in self.files:
            yield from self.read(file)

    def shard(self, rank: int, workers: int) -> Files:
        """The part of the stream that worker ``rank`` of ``workers`` reads."""
        return Files(self.files[rank::workers], self.read)


@dataclass(frozen=True)
class Part:
    """Which samples of a training stream a worker takes.

    Attributes:
        shard: ``samples``, ``files`` or ``none``, as ``data.shard``; rank, workers: of this worker, and of all.
        update: samples of an update over all workers; epoch: of an epoch.
        buffer: samples among which the next one is drawn; None: they come in their order.
    """

    shard: str = "samples"
    rank: int = 0
    workers: int = 1
    update: int = 0
    epoch: int = 0
    buffer: int | None = None

    @property
    def sharing(self) -> int:
        """The number of workers whose positions interleave, although each reads a sequence of its own."""
        return 1 if self.shard == "samples" else self.workers


WHOLE = Part()


def is_stream(dataset: Any) -> bool:
    """Whether a data set cannot be indexed: an IterableDataset, another iterable, or a function."""
    if isinstance(dataset, IterableDataset):
        return True
    by_number = hasattr(dataset, "__getitem__") or hasattr(dataset, "batch") or hasattr(dataset, "augmented")
    return not by_number and (callable(dataset) or hasattr(dataset, "__iter__"))


class Streamed(InOrder):
    """Makes a stream a data set, whose batches are the samples at given positions of the stream.
    A position before the last one read starts the stream anew, and so does each epoch.

    Args:
        stream: an iterable, or a function that returns an iterator; the function may take ``epoch``.
        name: of the stream, in messages.
        facts: of the data; shape: of an input.
        part: what this worker takes.

    Raises:
        RunFailed: the stream can be read once, or not by files where that is asked for.
    """

    def __init__(self, stream: Any, name: str, facts: Facts, shape: Any, part: Part = WHOLE) -> None:
        self.name, self.facts, self.shape, self.part = name, facts, shape, part
        if not callable(stream) and _iter_is_itself(stream):
            raise RunFailed(
                f"{name} is an iterator, which can be read once, and each epoch reads it from its beginning. "
                f"Return a function that makes one, or an IterableDataset"
            )
        if part.shard == "files":
            stream = _own_files(stream, name, part)
        self.stream = stream
        self.epoch, self.next = -1, 0
        self.iterator: Iterator[Any] | None = None
        self.last: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "iterator": None, "epoch": -1, "last": None}  # a reading process begins anew

    def augmented(self, key: tuple[int, int], positions: np.ndarray) -> Batch:
        """The samples at these positions of the epoch, as one batch in that order.

        Raises:
            RunFailed: the stream breaks or ends before, or a sample is not what the facts say.
        """
        places = positions // self.part.sharing
        order = np.argsort(places, kind="stable")
        found: list[Any] = [None] * len(places)
        with own_randomness():
            for number in order.tolist():
                found[number] = self._at(*key, int(places[number]))
            return self._batch(found, int(places.min()))

    def shares(self, index: int, count: int, size: int) -> Iterator[tuple[np.ndarray, Batch]]:
        """Yield the evaluation batches of worker ``index`` and their sample numbers; sample i is worker i % count's.

        Raises:
            RunFailed: the stream breaks or is empty, or a sample is not what the facts say.
        """
        self._begin(0)
        ended = False
        while not ended:
            samples, numbers = list[Any](), list[int]()
            with own_randomness():
                while len(samples) < size and not ended:
                    number = self.next
                    item = self._next(0, 0)
                    ended = item is END
                    if not ended and number % count == index:
                        samples.append(item)
                        numbers.append(number)
                batch = self._batch(samples, numbers[0]) if samples else None
            if batch is not None:
                yield np.array(numbers, dtype=np.int64), batch
        if not self.next:
            raise RunFailed(f"{self.name} is empty: it yields no sample")

    # --- one sample after the other --------------------------------------------------------------------------------

    def _at(self, seed: int, epoch: int, place: int) -> Any:
        if epoch != self.epoch or place < self.next - 1:
            self._begin(epoch, seed)
        while self.next <= place:
            self.last = self._next(seed, epoch)
            if self.last is END:
                raise RunFailed(self._ended())
        return self.last

    def _begin(self, epoch: int, seed: int = 0) -> None:
        torch.utils.data._utils.worker._worker_info = None  # a stream that shares itself out would be shared out twice
        self.epoch, self.next = epoch, 0
        with self._named():
            if hasattr(self.stream, "set_epoch"):
                self.stream.set_epoch(epoch)
            if isinstance(self.stream, Iterable):
                made = iter(self.stream)
            else:
                takes = "epoch" in inspect.signature(self.stream).parameters
                made = iter(self.stream(epoch=epoch) if takes else self.stream())
        buffer = self.part.buffer
        self.iterator = made if buffer is None else _shuffled(made, buffer, (seed, epoch))

    def _next(self, seed: int, epoch: int) -> Any:
        """The next sample, whose random numbers follow from (seed, epoch, position); ``END`` after the last one."""
        assert self.iterator is not None
        seed_for_sample(seed, epoch, self.next)
        with self._named():
            item = next(self.iterator, END)
        self.next += item is not END
        return item

    def _named(self) -> Naming:
        return Naming(f"{self.name}, at sample {self.next},", self.stream)

    def _ended(self) -> str:
        part, read = self.part, self.next
        if not read:
            return f"{self.name} is empty: it yields no sample" + self._worker_hint()
        needs = f"an epoch of {part.epoch // part.update} updates takes {part.epoch // part.sharing}"
        enough = read * part.sharing // part.update
        instead = f"Type data.steps_per_epoch={enough}" if enough else "Type a smaller data.batch_size"
        return f"{self.name} ended after {read} samples{self._worker_hint()}, and {needs}. {instead}"

    def _worker_hint(self) -> str:
        return f" of worker {self.part.rank} (data.shard=files)" if self.part.shard == "files" else ""

    # --- batches ---------------------------------------------------------------------------------------------------

    def _batch(self, items: list[Any], first: int) -> Batch:
        where = f"{self.name}, near sample {first},"
        for item in items:
            if not isinstance(item, (tuple, list)) or len(item) != 2:
                raise RunFailed(f"{where} yields a {type(item).__name__}, not a pair (input, label)")
        try:
            inputs, labels = default_collate([tuple(item) for item in items])
        except (RuntimeError, TypeError) as error:
            self._blame(items, where)
            raise RunFailed(f"{where} yields samples that cannot be a batch: {first_line(error)}") from error
        check_shape(inputs, self.shape, where)
        check_labels(labels, self.facts, where)
        return inputs, labels

    def _blame(self, items: list[Any], where: str) -> None:
        """Name the sample of another shape, if there is one."""
        for item in items:
            try:
                inputs, _ = default_collate([tuple(item)])
            except (RuntimeError, TypeError):
                return
            check_shape(inputs, self.shape, where)


END = object()
"""What comes after a stream's last sample."""


def _iter_is_itself(stream: Any) -> bool:
    """Whether an iterable is an iterator (e.g. a generator), which can be read only once."""
    return hasattr(stream, "__next__")


def _own_files(stream: Any, name: str, part: Part) -> Files:
    if not isinstance(stream, Files):
        raise RunFailed(
            f"{name} ({type(stream).__name__}) has no files that could be dealt out (data.shard=files). "
            f"Return a trainer.data.streamed.Files(files, read), or type data.shard=samples"
        )
    if len(stream.files) < part.workers:
        raise RunFailed(
            f"{name} has {len(stream.files)} files for {part.workers} workers (data.shard=files). Type "
            f"data.shard=samples"
        )
    return stream.shard(part.rank, part.workers)


def _shuffled(samples: Iterator[Any], size: int, key: tuple[int, int]) -> Iterator[Any]:
    """Shuffle a stream within a buffer: each sample is drawn from the ``size`` read last, at random by ``key``."""
    draw, held = np.random.default_rng(key), list[Any]()
    for sample in samples:
        held.append(sample)
        if len(held) == size:
            place = int(draw.integers(size))
            held[place], held[-1] = held[-1], held[place]
            yield held.pop()
    draw.shuffle(held)  # type: ignore[arg-type]
    yield from held


@dataclass
class Naming:
    """A context manager that turns an error in the user's code into one sentence with its traceback."""

    name: str
    call: Any

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, (RunFailed, UserError)):
            raise failed(self.name, "reading", self.call, error) from error
