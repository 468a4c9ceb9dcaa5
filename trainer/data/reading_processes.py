"""Reading processes of a DataLoader: they send errors as one sentence, use shared memory, and report their death."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Dataset, get_worker_info

from trainer.data.batch_inputs import pinned
from trainer.errors import RunFailed, UserError, why
from trainer.host.parent_death import end_with
from trainer.host.signals import NUMBERS

if TYPE_CHECKING:
    from trainer.data.shared_batches import SharedBatches


@dataclass(frozen=True)
class Refusal:
    """Sent by a reading process in place of a batch that it cannot read; exceptions would arrive in a traceback."""

    sentence: str


class ReaderDataset(Dataset[Any]):
    """The data set of a reading process, which sends errors as a :class:`Refusal` and batches by shared memory.

    Args:
        dataset: with ``__getitems__``.
        shared: memory for its batches; None: they go torch's way.
    """

    def __init__(self, dataset: Any, shared: SharedBatches | None = None) -> None:
        self.dataset = dataset
        self.shared = shared

    def __getitems__(self, address: Any) -> Any:
        try:
            batch = self.dataset.__getitems__(address)
            return batch if self.shared is None else self.shared.put(batch)
        except (RunFailed, UserError) as error:
            return Refusal(str(error))


def from_processes(loader: Iterable[Any], shared: SharedBatches | None = None) -> Iterator[Any]:
    """Yield the batches that the reading processes of a ``DataLoader`` send; their refusals are raised here.

    Raises:
        RunFailed: a reading process cannot read a file, or has died.
    """
    from trainer.data.shared_batches import Parcel

    batches = iter(loader)
    while True:
        try:
            with deaths_named():
                batch = next(batches, None)
        except (EOFError, ConnectionError) as error:  # it died while it handed a batch over
            raise _died("Killed, while it handed a batch over") from error
        if batch is None:
            return
        if isinstance(batch, Refusal):
            raise RunFailed(batch.sentence)
        if shared is not None and isinstance(batch, Parcel):
            yield shared.take(batch)
        else:  # it had no room in a slot, or there are none
            yield pinned(batch) if shared is not None and shared.pinned else batch


def _tells_of_a_death(error: RuntimeError) -> bool:
    """Whether torch raised this error because a reading process died (it can raise it anywhere in the main thread)."""
    return str(error).startswith("DataLoader worker (pid")


@contextmanager
def deaths_named() -> Iterator[None]:
    """Context manager: torch's error for a dead reading process becomes one sentence.

    Raises:
        RunFailed: a reading process has died.
    """
    try:
        yield
    except RuntimeError as error:
        if not _tells_of_a_death(error):
            raise
        raise _died(why(error)) from error


def _died(how: str) -> RunFailed:
    return RunFailed(f"a reading process has died: {how} (fewer: data.num_workers=1)")


def reading_process(number: int) -> None:
    """The ``worker_init_fn`` of reading processes: each ends with its parent, and gets its own shared slots.

    The slots need a number of their own: ``Streamed`` clears torch's worker info, so that the user's code does not
    split the stream a second time.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    end_with(parent.pid)  # os.getppid() is another process if it is dead already
    for request in NUMBERS:  # a scheduler signals the whole process group, and the worker reads until it has saved
        signal.signal(request, signal.SIG_IGN)
    about = get_worker_info()
    if about is not None and isinstance(about.dataset, ReaderDataset) and about.dataset.shared is not None:
        about.dataset.shared.reader = number


def as_it_is(batch: Any) -> Any:
    """The ``collate_fn`` of reading processes, which returns the batch as it is: data sets read whole batches."""
    return batch


def end_processes(loader: DataLoader[Any] | None) -> None:
    """End the reading processes of a DataLoader."""
    iterator = getattr(loader, "_iterator", None)
    if loader is not None and iterator is not None:
        try:
            iterator._shutdown_workers()
        except RuntimeError as error:
            if not _tells_of_a_death(error):  # what has died need not be ended
                raise
        loader._iterator = None
