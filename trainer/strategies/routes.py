"""The ways of DDP's gradient buckets: several process groups side by side, or groups of neighbours first.

    comm_streams=N   bucket i goes over group i modulo N. Buckets of other groups need not wait for it.
    reduce_group=N   hierarchical all-reduce (Jia et al., 2018, arXiv:1807.11205): N neighbours add up among themselves,
                     each a piece of the bucket; each piece is added up across the groups; the neighbours gather all.
                     Between groups a worker sends 1 / N of what it sends in a ring over all.

Each way exchanges its buckets in DDP's order, which is the same on all workers: on a GPU on a stream of its own, else
on a thread.
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with the types themselves.

import queue
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from trainer.host import transfers
from trainer.strategies.process_group import ProcessGroup, reduce_scatter

Exchanged = torch.futures.Future[torch.Tensor]


class Way:
    """One of the ways of buckets.

    Args:
        size: workers. near: the group of this worker's neighbours, and far: of those with its place in other groups;
        without ``near`` one ring over ``far``.
    """

    def __init__(self, size: int, far: dist.ProcessGroup, near: dist.ProcessGroup | None, device: torch.device) -> None:
        self.size, self.far, self.near, self.device = size, far, near, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        if self.stream is None:
            threading.Thread(target=self._work, daemon=True, name="gradients").start()

    def exchange(self, buffer: torch.Tensor) -> Exchanged:
        """Average a bucket over all workers, while the backward goes on."""
        if self.stream is None:
            future: Exchanged = torch.futures.Future()
            self.waiting.put(lambda: self._answer(future, buffer))
            return future
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            self._add_up(buffer)
            return transfers.answer(buffer)

    def close(self) -> None:
        """End the thread."""
        self.waiting.put(None)

    def _work(self) -> None:
        while (one := self.waiting.get()) is not None:
            one()

    def _answer(self, future: Exchanged, buffer: torch.Tensor) -> None:
        try:
            self._add_up(buffer)
        except Exception as error:  # the backward waits for it, and names the worker that is missing
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            future.set_result(buffer)

    @torch.no_grad()
    def _add_up(self, buffer: torch.Tensor) -> None:
        buffer /= self.size
        if self.near is None:
            dist.all_reduce(buffer, group=self.far)
            return
        neighbours = self.near.size()
        whole = torch.nn.functional.pad(buffer, (0, -buffer.numel() % neighbours))
        piece = whole.new_empty(whole.numel() // neighbours)
        reduce_scatter(piece, whole, self.near)
        dist.all_reduce(piece, group=self.far)
        dist.all_gather_into_tensor(whole, piece, group=self.near)
        buffer.copy_(whole[: buffer.numel()])


class Routes:
    """All ways of a worker.

    Args:
        number: of ways. neighbours: in a group; None: one ring over all.
    """

    def __init__(self, group: ProcessGroup, number: int, neighbours: int | None) -> None:
        seat = group.seat
        self.ways: list[Way] = []
        for _ in range(number):
            near = group.subgroup_of(neighbours) if neighbours else None
            far = group.across(neighbours or 1)
            self.ways.append(Way(seat.size, far, near, torch.device(seat.device)))

    def close(self) -> None:
        """End the threads."""
        for way in self.ways:
            way.close()


def by_its_way(state: Routes, bucket: dist.GradBucket) -> Exchanged:
    """The hook of DDP."""
    return state.ways[bucket.index() % len(state.ways)].exchange(bucket.buffer())
