"""What a null GPU cannot do, and what takes its place. Every exception that the gate makes from the real path is here.

- Tensors on ``cuda`` have no values (FakeTensorMode): a number that is read from one is 1.0, True or 1. What has come
  to the host by ``Arriving`` is ones, and metrics are computed of them without the mode.
- Sparse gradients have no rows and count as coalesced. On a GPU each is coalesced, which waits for it.
- Modules move to ``cuda`` by new parameters: fake tensors cannot be swapped in place. So a model that is sharded is
  there from the beginning, and not on the host.
- Workers of ``shard=optimizer`` tell nobody which state they have: the first one's own is all.
- The process group is torch's fake one: a collective call returns at once, and its future is done. DDP without
  ``comm_hook`` has one that hands its bucket back, and keeps its first buckets, because new ones are made by addresses.
- The random state of the GPU is zeros. Memory cannot be pinned: ``pin_memory`` returns its tensor, which then counts as
  pinned. Events are counted, see ``waits.py``.
- A file is mapped into the host's memory as it is, before its pixels are copied to ``cuda``.
- DDP with ``find_unused_parameters`` or ``static_graph`` does not run: it checks the addresses of its own memory.
- The exchange of ``task=binary`` over several workers, and the coalescing of sparse gradients, are not counted.
- Workers of parameter servers are not here: a server needs the values of gradients.
- The best model is copied and not written, because its tensors have no values.
- No callback asks to stop the run. Each number that comes says one does.
- ``execution.expandable_segments=false``: the driver that is not there has no virtual addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.null_gpu.waits import Waits
from trainer.host import transfers
from trainer.metrics.binary import BinaryExam, BinaryMeter, BinaryObjective
from trainer.metrics.classification import ClassObjective
from trainer.metrics.label_rankings import RankingsShown
from trainer.metrics.sums import SumsObjective
from trainer.strategies import comm_hooks, in_ddp, process_group
from trainer.worker import build
from trainer.worker.callbacks import Callbacks


def _apply(self: nn.Module, change: Any, recurse: bool = True) -> nn.Module:
    for child in self.children():
        child._apply(change)
    for name, parameter in list(self._parameters.items()):
        if parameter is not None:
            with torch.no_grad():
                moved = change(parameter)
            self._parameters[name] = nn.Parameter(moved, requires_grad=parameter.requires_grad)
    for name, buffer in list(self._buffers.items()):
        if buffer is not None:
            self._buffers[name] = change(buffer)
    return self


def _handed_back(state: Any, bucket: Any) -> Any:
    done: Any = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


_handed_back.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}  # DDP checks


class _FirstBuckets:
    """DDP's reducer, which keeps its first buckets."""

    def __init__(self, reducer: Any) -> None:
        self.__dict__["reducer"] = reducer

    def __getattr__(self, name: str) -> Any:
        return (lambda: False) if name == "_rebuild_buckets" else getattr(self.reducer, name)


def _register(ddp: Any, options: Any, updater: Any, routes: Any) -> Any:
    memory = comm_hooks.register(ddp, options, updater, routes)
    in_buckets(ddp, options.comm_hook if routes is None else "routes")
    return memory


def in_buckets(ddp: Any, comm_hook: str) -> None:
    """DDP as it can be with GPUs that are not there."""
    if comm_hook == "none":
        ddp.register_comm_hook(None, _handed_back)
    ddp.reducer = _FirstBuckets(ddp.reducer)


class _Done:
    """A sum of the fake process group that somebody waits for by its future, which the group's own has no value in."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def get_future(self) -> Any:
        done: Any = torch.futures.Future()
        done.set_result([self.tensor])
        return done

    def as_one(self) -> Any:
        done: Any = torch.futures.Future()
        done.set_result(self.tensor)
        return done

    def wait(self) -> None:
        pass


def _arrived(arriving: transfers.Arriving, read: Any, *args: Any) -> list[torch.Tensor]:
    read(arriving, *args)
    with _disable_current_modes():
        return [
            torch.ones(one.shape, dtype=one.dtype) if isinstance(one, FakeTensor) else one for one in arriving.tensors
        ]


OF_HOST = (
    *(
        (of, name)
        for of in (ClassObjective, SumsObjective, BinaryObjective)
        for name in ("summary", "validation", "kept")
    ),
    (BinaryObjective, "add"),
    (BinaryObjective, "over_workers"),
    (BinaryExam, "__init__"),
    (BinaryExam, "_rank"),
    (BinaryMeter, "ranked"),
    (RankingsShown, "_see"),
)
"""What is computed on the host, of numbers that have come from a GPU."""


def on_host(call: Any) -> Any:
    """The function, without modes where its tensors have values. With tensors of a GPU it waits, and is counted."""

    def called(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(one, FakeTensor) for one in tree_leaves(args)):
            return call(*args, **kwargs)
        with _disable_current_modes():
            return call(*args, **kwargs)

    return called


@contextmanager
def in_place(workers: int, waits: Waits) -> Iterator[None]:
    """Context manager: the exceptions of this page."""
    read = transfers.Arriving.read
    start, tensor, sum_up = dist.init_process_group, torch.tensor, dist.all_reduce
    prepared = build.prepared

    def all_reduce(values: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        sum_up(values, *args, **kwargs)
        return _Done(values) if async_op else None

    def begin(*args: Any, **kwargs: Any) -> None:
        start("fake", store=FakeStore(), rank=0, world_size=workers)

    def made(data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return tensor(data, **kwargs) if device is None else tensor(data, **kwargs).to(device)

    with ExitStack() as stack:
        for place, name, fake in (
            (nn.Module, "_apply", _apply),
            (torch, "tensor", made),
            (torch, "from_file", on_host(torch.from_file)),
            (torch.Tensor, "pin_memory", lambda self, *args: waits.pin(self)),
            (torch.cuda.Event, "record", lambda self, stream=None: waits.record(self)),
            (torch.cuda.Event, "query", lambda self: waits.query(self)),
            (torch.cuda.Event, "elapsed_time", lambda self, end: 1.0),
            (torch.cuda.Event, "synchronize", lambda self: waits.synchronize(self)),
            (torch.cuda, "synchronize", lambda device=None: waits.wait("synchronize")),
            (torch.cuda.Stream, "synchronize", lambda self: waits.wait("synchronize")),
            (transfers.Arriving, "read", lambda self, *args: _arrived(self, read, *args)),
            *((place, name, on_host(getattr(place, name))) for place, name in OF_HOST),
            (torch.cuda, "get_rng_state", lambda *args: torch.zeros(16, dtype=torch.uint8)),
            (dist, "init_process_group", begin),
            (build, "prepared", lambda model, config, plan, device, where=None: prepared(model, config, plan, device)),
            (dist, "all_reduce", all_reduce),
            (Callbacks, "why", lambda self, *args: ""),
            (process_group.ProcessGroup, "_wait_until_all_have", lambda self, what: None),
            (process_group.ProcessGroup, "gather_objects", lambda self, own: [own]),
            (in_ddp, "register", _register),
            (transfers, "answer", lambda buffer: _Done(buffer).as_one()),
        ):
            stack.enter_context(patch.object(place, name, fake))
        yield
