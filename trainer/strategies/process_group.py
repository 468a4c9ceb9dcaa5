"""A torch process group as strategies use it: join, equal start, sums, buffers, naming missing workers."""

from __future__ import annotations

import datetime
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.config.schema import GroupStrategy
from trainer.errors import Missing, RunFailed, first_line
from trainer.host.notes_board import NoNote, verdict
from trainer.host.transfers import on_its_way, recorded
from trainer.strategies.gpu_watch import GpuWatch
from trainer.strategies.liveness import RollCall
from trainer.strategies.seat import Seat

TIMED_OUT = "the time was over"
CAUSES = {
    "timed out": TIMED_OUT,
    "timeout": TIMED_OUT,
    "closed by peer": "a connection was closed at its other end",
    "connection closed": "a connection was closed at its other end",
    "reset by peer": "a connection was reset at its other end",
    "broken pipe": "a connection was closed at its other end",
    "connection refused": "a connection was refused",
    "no route to host": "there was no way to a host",
}
"""Words in the messages of Gloo, NCCL and torch's stores, and what they mean."""
LETS_GO_S = 0.02
"""So long after its last exchange no thread of Gloo holds the group any more."""
CHATTER = re.compile(r"\[[^\]\s]*\.(cc|cpp|cu|h|hpp):\d+\]\s*|\[c10d\]\s*")
"""Source locations in these messages."""


class ProcessGroup:
    """This worker's membership of a process group: NCCL on GPUs, Gloo elsewhere.

    Args:
        options: of the strategy.

    Raises:
        RunFailed: workers did not join in time (the message names them), or the options are no ``GroupStrategy``.
    """

    def __init__(self, seat: Seat, options: GroupStrategy) -> None:
        if not isinstance(options, GroupStrategy):
            raise RunFailed(
                f"ProcessGroup(seat, options) was given a {type(options).__name__} as options, which has no "
                f"timeout_s, init and buffers. Write Options = GroupStrategy (from trainer.config.schema) in "
                f"the class of the strategy's worker"
            )
        self.seat, self.options = seat, options
        self.roll_call = RollCall(seat.store.under("roll-call"), seat.rank, seat.size)
        self.batches: Any = None
        self.on_host: Any = None
        self.subgroups: list[Any] = []
        self.watch: GpuWatch | None = None
        if seat.device.startswith("cuda") and seat.size > 1:
            self.watch = GpuWatch(options.timeout_s, self._overdue, seat.send_failure)
        try:
            self._join("the start of the process group")
        except BaseException:
            if self.watch is not None:
                self.watch.close()
            raise

    def _join(self, meeting: str) -> None:
        seat, joined, cuda = self.seat, threading.Event(), self.seat.device.startswith("cuda")
        assert seat.group_store is not None, "a process group meets in a store of torch's"
        with self.naming_the_missing(meeting):
            if self.watch is not None:
                self._wait_until_all_have("come")  # NCCL waits for them without an end
                self.watch.queued(self.roll_call.reached, meeting, joined.is_set)
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                store=dist.PrefixStore("group", seat.group_store),
                rank=seat.rank,
                world_size=seat.size,
                timeout=self.limit_of_nccl if cuda else self.limit,
                device_id=torch.device(seat.device) if cuda else None,
            )
            joined.set()
            self._wait_until_all_have("joined")

    def _wait_until_all_have(self, what: str) -> None:
        """Keep this worker until all have come or joined. A worker that left before all have joined would break
        connections that others still open, at which Gloo fails or ends their process."""
        verdict(self.seat.store.under(what), self.seat.rank, self.seat.size, "", lambda notes: "", self.limit)

    @property
    def limit(self) -> datetime.timedelta:
        """How long a collective call waits for missing workers."""
        return datetime.timedelta(seconds=self.options.timeout_s)

    @property
    def limit_of_nccl(self) -> datetime.timedelta:
        """When NCCL itself ends the workers that wait: twice as late as :class:`GpuWatch` and the launcher find the
        worker that is missing."""
        return 2 * datetime.timedelta(seconds=max(self.options.timeout_s, self.seat.others.hang_timeout_s))

    def equal_start(self, model: nn.Module) -> None:
        """Give all workers the same parameters and buffers: those of worker 0, or those of the common seed."""
        with self.naming_the_missing("the equal start"), torch.no_grad():
            if self.options.init == "broadcast":
                for tensor in (*model.parameters(), *model.buffers()):
                    _exchanged(tensor, lambda whole: dist.broadcast(whole, 0))
            else:
                self._check_equal_start(model)

    def _check_equal_start(self, model: nn.Module) -> None:
        values = torch.stack(
            [p.double().sum() for p in model.parameters()] + [p.double().pow(2).sum() for p in model.parameters()]
        )
        values = values.to(self.seat.device)  # a model that is sharded begins on the host
        least, greatest = values.clone(), values.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(greatest, dist.ReduceOp.MAX)
        if not torch.equal(least, greatest):
            raise RunFailed(
                "strategy.init=same_seed: the workers drew different parameters, because the model takes randomness "
                "from elsewhere than torch's generator. Use strategy.init=broadcast."
            )

    def weight(self, denominator: float) -> float | torch.Tensor:
        """The factor on a worker's mean loss where the workers' gradients are averaged: 1.0, or if their denominators
        differ denominator * workers / all."""
        if self.seat.others.even:
            return 1.0
        own = torch.full((1,), denominator, dtype=torch.float64, device=self.seat.device)  # a copy would be waited for
        everybody = self.all_reduce_sum(own)[0]
        return denominator * self.seat.size / everybody.clamp_min(torch.finfo(torch.float64).tiny)

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over workers of a float64 vector."""
        if self.seat.size == 1:
            return values
        with self.naming_the_missing("a sum over the workers"):
            sums = on_its_way(values, self.seat.device).to(torch.float64, copy=True).contiguous()
            dist.all_reduce(sums)
        return sums

    def scatter(self, parts: list[Any] | None) -> Any:
        """Send one part to each worker: the first worker passes all parts, the others None; each returns its own."""
        received: list[Any] = [None]
        with self.naming_the_missing("the scattering of batches"):
            if self.batches is None:  # a group of its own, on the CPU: batches travel while gradients do
                self.batches = dist.new_group(backend="gloo", timeout=self.limit)
            dist.scatter_object_list(received, parts, 0, group=self.batches)
        return received[0]

    def gather_objects(self, own: Any) -> list[Any]:
        """Return one object of each worker on the first one, an empty list on the others. They go by the CPU."""
        found: list[Any] | None = [None] * self.seat.size if self.seat.rank == 0 else None
        if self.on_host is None:
            self.on_host = dist.new_group(backend="gloo", timeout=self.limit)
        dist.gather_object(own, found, 0, group=self.on_host)
        return found or []

    def subgroup_of(self, size: int) -> dist.ProcessGroup:
        """Make groups of so many neighbouring workers each; returns the one of this worker."""
        own, every = dist.new_subgroups(size, timeout=self.limit)
        self.subgroups += every
        return own  # type: ignore[no-any-return]

    def across(self, size: int) -> dist.ProcessGroup:
        """Make groups of the workers with the same place among so many neighbours; returns the one of this worker."""
        places = [[*range(place, self.seat.size, size)] for place in range(size)]
        own, every = dist.new_subgroups_by_enumeration(places, timeout=self.limit)
        self.subgroups += every
        assert isinstance(own, dist.ProcessGroup), "each worker is in one of them"
        return own

    def agree_on_buffers(self, model: nn.Module) -> None:
        """Give all workers the first worker's buffers, or their average, as the options say."""
        with self.naming_the_missing("the agreement on buffers"), torch.no_grad():
            for buffer in model.buffers():
                if self.options.buffers == "rank0" or not buffer.is_floating_point():
                    _exchanged(buffer, lambda whole: dist.broadcast(whole, 0))
                else:
                    _exchanged(buffer, dist.all_reduce)
                    buffer /= self.seat.size

    def close(self, failed: bool = False) -> None:
        """Leave the torch process group.

        Args:
            failed: this process ends by an error. Exchanges under way are aborted, because their end may never come:
                torch waits for it when a group is destroyed, for as long as for a missing worker.
        """
        if self.watch is not None:
            self.watch.close()
        self.roll_call.end()
        if not dist.is_initialized():
            return
        if not failed or self.seat.size == 1:
            # A thread of Gloo may still hold the group for the exchange that it has just done. If it were the last to
            # let go, the group would end in this thread, wait for the thread itself, and so abort the process.
            held = [self.batches, self.on_host, *self.subgroups, dist.group.WORLD]
            self.batches, self.on_host, self.subgroups = None, None, []
            dist.destroy_process_group()
            time.sleep(LETS_GO_S)
            held.clear()
            return
        for group in (
            self.batches,
            self.on_host,
            *self.subgroups,
            dist.group.WORLD,
        ):  # Gloo's goes on in its threads, and ends with the process
            if group is not None:
                group.abort()

    @contextmanager
    def naming_the_missing(self, meeting: str) -> Iterator[None]:
        """Context manager: a failed collective call raises an error that names the workers who did not come.

        Raises:
            Missing: naming the missing workers, from the error of the collective.
            RunFailed: none is missing, or nobody knows.
        """
        if self.watch is not None:
            self.watch.check()
        self.roll_call.reached, began = self.roll_call.reached + 1, time.monotonic()
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            if isinstance(error, RunFailed) or not _is_about_peers(error):
                raise
            raise self._failed(meeting, error, time.monotonic() - began, self.roll_call.reached) from error
        finally:
            if self.watch is None:
                self.roll_call.reached = 0
        if self.watch is not None:  # the GPU has still to come to the exchanges
            self.watch.queued(self.roll_call.reached, meeting, recorded(torch.device(self.seat.device)).query)

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Wait until the GPU has come to an event.

        Raises:
            Missing: naming the workers that did not come to an exchange before it.
            RunFailed: the exchange did not end, and none is missing, or nobody knows.
        """
        if self.watch is None:
            event.synchronize()
        else:
            self.watch.wait_for(event)

    def _overdue(self, meeting: str, waited_s: float, number: int) -> RunFailed:
        """The error of a meeting to whose end the GPU has not come."""
        return self._failed(meeting, TimeoutError("timed out"), waited_s, number)

    def _failed(self, meeting: str, error: Exception, waited_s: float, number: int) -> RunFailed:
        """The error of a collective call that failed after so many seconds, which names the missing workers.

        Args:
            number: of the meeting; those who have not reached it are missing.
        """
        said = cause(first_line(error))
        try:
            missing = self.roll_call.missing(number)
        except TimeoutError:
            return RunFailed(f"worker {self.seat.rank}: {meeting} failed and host 0 cannot be reached: {said}")
        except (RuntimeError, dist.DistError):
            return RunFailed(f"worker {self.seat.rank}: {meeting} failed and the launcher is gone: {said}")
        if not missing:
            return RunFailed(f"worker {self.seat.rank}: {meeting} failed: {said}")
        who = self.seat.names(missing)
        if said == TIMED_OUT:
            within = f" within {self.options.timeout_s:g} s (strategy.timeout_s)"
        else:  # of the missing worker, or of another one that has given up on it
            within = f": after {waited_s:.0f} s {said} (strategy.timeout_s={self.options.timeout_s:g})"
        return Missing(f"{', '.join(who)} did not arrive at {meeting}{within}", who)


def reduce_scatter(part: torch.Tensor, inputs: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Add up the workers' inputs (workers * N,); each worker gets its part (N,).

    Gloo's own is an all-reduce, of which a worker keeps its part: twice the bytes. Here each worker gets its part from
    all others, and adds up in the order of the workers.
    """
    if inputs.is_cuda:
        dist.reduce_scatter_tensor(part, inputs, group=group)
        return
    parts = torch.empty_like(inputs)
    dist.all_to_all_single(parts, inputs, group=group)
    torch.sum(parts.view(group.size(), -1), 0, out=part.view(-1))


def cause(said: str) -> str:
    """Why a collective call failed, without a library's own places in its source and its remarks."""
    for words, why in CAUSES.items():
        if words in said.lower():
            return why
    return CHATTER.sub("", said).strip()


def _exchanged(tensor: torch.Tensor, exchange: Callable[[torch.Tensor], Any]) -> None:
    """Change a tensor by a collective that takes contiguous memory, whatever the tensor's own memory format.

    Gloo goes by the address and the number of elements: of a strided tensor it would write over what lies between.
    """
    whole = tensor.contiguous()
    exchange(whole)
    if whole.data_ptr() != tensor.data_ptr():
        tensor.copy_(whole)


def _is_about_peers(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, (NoNote, dist.DistError)) or any(
        word in text for word in ("timed out", "timeout", "connection", "gloo", "nccl", "peer", "socket")
    )
