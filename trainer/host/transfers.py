"""Copies between a GPU and the memory of this host that the host does not wait for before it needs the numbers.

A copy from a GPU returns at once only into pinned memory, and a copy to a GPU only out of it. Without a GPU nothing is
copied. The GPU does its work in the order in which it was asked for, so a copy has the numbers of its moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

MOST_PINNED = 32 << 20
"""Bytes of a tensor that is copied to a GPU out of pinned memory; a larger one is waited for."""


class Arriving:
    """Tensors of one device and type that are on their way to the host, in one copy. Those of a CPU are there.

    Args:
        tensors: on a GPU, what changes them later does not change the copy.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        self.event: torch.cuda.Event | None = None
        if self.tensors[0].device.type != "cuda":
            return
        whole = torch.cat([tensor.reshape(-1) for tensor in self.tensors])
        there = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True)
        there.copy_(whole, non_blocking=True)
        self.event = recorded(whole.device)
        parts = there.split([tensor.numel() for tensor in self.tensors])
        self.tensors = [part.view(tensor.shape) for part, tensor in zip(parts, self.tensors, strict=True)]

    @property
    def there(self) -> bool:
        """Whether :meth:`read` would not wait."""
        return self.event is None or self.event.query()

    def read(self, wait_for: Callable[[torch.cuda.Event], object] | None = None) -> list[torch.Tensor]:
        """Return the tensors on the CPU. Where they are not there yet, wait for them.

        Args:
            wait_for: waits for the event; None: for ever.
        """
        if self.event is not None:
            self.event.synchronize() if wait_for is None else wait_for(self.event)
            self.event = None
        return self.tensors


class Queue:
    """Batches of a GPU that the host takes in when they are there, in order. It waits once, at the end.

    Args:
        take: called with the tensors of a batch on the CPU, and with what was put in beside them.
    """

    def __init__(self, take: Callable[..., None]) -> None:
        self.take = take
        self.coming: list[tuple[Arriving, tuple[object, ...]]] = []

    def put(self, tensors: Sequence[torch.Tensor], *others: object) -> None:
        """Add a batch, and take in those that are there. On a CPU this one is."""
        self.coming.append((Arriving(tensors), others))
        while self.coming and self.coming[0][0].there:
            self._take_first()

    def finish(self) -> None:
        """Take in all that is left."""
        if self.coming:
            self.coming[-1][0].read()  # the batches before it come earlier
        while self.coming:
            self._take_first()

    def _take_first(self) -> None:
        arriving, others = self.coming.pop(0)
        self.take(*arriving.read(), *others)


def recorded(device: torch.device, timed: bool = False) -> torch.cuda.Event:
    """Return an event of a GPU: it is done when all is done that the GPU was asked for so far.

    Args:
        timed: it notes the time.
    """
    event = torch.cuda.Event(enable_timing=timed)
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for(event: torch.cuda.Event) -> None:
    """Wait for an event of a GPU, in any thread.

    A thread begins with the first GPU as its current one. CUDA would open it for the process, for some 500 MB.
    """
    with torch.cuda.device(event.device):
        event.synchronize()


class IdleTime:
    """Seconds in which a GPU had nothing to do while the host waited for something: a pair of events around each wait.

    The first event is done when the GPU has done what it was asked for, the second one when it gets more to do. The
    host asks whether they are done, and waits for none.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self.known = 0.0

    @contextmanager
    def around(self) -> Iterator[None]:
        """Context manager: the host waits in it."""
        begin = recorded(self.device, timed=True)
        yield
        self.pairs.append((begin, recorded(self.device, timed=True)))

    def seconds(self) -> float:
        """The idle time so far, of the waits that the GPU has come past."""
        while self.pairs and self.pairs[0][1].query():
            begin, end = self.pairs.popleft()
            self.known += begin.elapsed_time(end) / 1000
        return self.known


def on_its_way(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a tensor on a device. A GPU gets a small tensor of the CPU when it comes to it: nobody waits."""
    device = torch.device(device) if isinstance(device, str) else device
    if tensor.device == device:
        return tensor
    if tensor.device.type == "cpu" and device.type == "cuda" and tensor.nbytes <= MOST_PINNED:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def answer(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """What DDP waits for of a hook: a future that is done, or on a GPU will be when the current stream comes to it."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    done.set_result(buffer)
    return done
