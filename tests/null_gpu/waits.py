"""Counts what makes the host wait for a GPU, and the kernels of each phase of a run, by the product's own line.

The null GPU is as far behind as can be: nothing is done before the host waits for it. So an event is done when the host
has waited for it or for something later, and ``Event.query`` says no before. Who polls an event waits for it.
"""

from __future__ import annotations

import ctypes
import threading
import traceback
from collections import Counter
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READ = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
SIZED_BY_VALUES = ("aten::nonzero", "aten::bincount", "aten::masked_select", "aten::_unique2", "aten::unique_dim")
COPIES = ("aten::_to_copy", "aten::copy_")


def registered(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in memory that is registered with the null GPU's runtime."""
    if isinstance(tensor, FakeTensor):
        return False
    runtime = ctypes.CDLL(None)
    return bool(runtime.null_gpu_registered(ctypes.c_void_p(tensor.data_ptr())))


def line() -> str:
    """The product's innermost line, such as ``worker/loop.py:12``; ``backward``: a thread of autograd."""
    frames = [frame for frame in traceback.extract_stack(limit=80) if "/trainer/" in frame.filename]
    frames = [frame for frame in frames if "/tests/" not in frame.filename]
    if not frames:
        return "backward"
    return f"{frames[-1].filename.rpartition('/trainer/')[2]}:{frames[-1].lineno}"


class Waits(TorchDispatchMode):
    """Counts by phase.

    Attributes:
        phase: what the run does now. found: waits by phase, kind and line. kernels: operators on a GPU by phase and
        line; a view is none, and a question for a size neither.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.found: Counter[tuple[str, str, str]] = Counter()
        self.kernels: Counter[tuple[str, str]] = Counter()
        self.asked = self.done = 0  # events so far, and those of them that the host knows to be done
        self.operators, self.queried, self.times = 0, (0, 0), 0
        self.pinned: dict[int, torch.Tensor] = {}

    def wait(self, kind: str) -> None:
        """Count a wait of this kind, after which all is done that the GPU was asked for."""
        self.found[self.phase, kind, line()] += 1
        self.done = self.asked

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Remember that a tensor's memory is pinned."""
        self.pinned[tensor.untyped_storage()._cdata] = tensor  # kept, so that no other storage gets the address
        return tensor

    def record(self, event: Any, stream: Any = None) -> None:
        """``Event.record``."""
        self.asked += 1
        event.number = self.asked

    def query(self, event: Any) -> bool:
        """``Event.query``. Who asks a third time, and has asked the GPU for nothing meanwhile, waits. A thread that
        watches events holds up nobody."""
        if threading.current_thread() is threading.main_thread():
            same = self.queried == (event.number, self.operators)
            self.queried, self.times = (event.number, self.operators), self.times + 1 if same else 1
            if event.number > self.done and self.times > 2:
                self._wait_for(event)
        return bool(event.number <= self.done)

    def synchronize(self, event: Any) -> None:
        """``Event.synchronize``."""
        if event.number > self.done:
            self._wait_for(event)

    def _wait_for(self, event: Any) -> None:
        asked, self.asked = self.asked, event.number  # what came later is not waited for
        self.wait("event")
        self.asked = asked

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for one in tensors:
            if isinstance(one, FakeTensor):
                one.constant = None  # or torch would know the value of a number that was copied to the GPU
        name, on_gpu = func._schema.name, any(one.device.type == "cuda" for one in tensors)
        self.operators += on_gpu
        if on_gpu and _computes(func):
            self.kernels[self.phase, line()] += 1
        if name == "aten::record_stream" or name.startswith("aten::_fused_"):  # FakeTensor would run it
            return None
        if name in READ:
            if on_gpu:
                self.wait(name.removeprefix("aten::").replace("_local_scalar_dense", "item"))
            return _number(name, tensors[0])
        if on_gpu and name in SIZED_BY_VALUES:
            self.wait(name.removeprefix("aten::"))
        if on_gpu and name == "aten::index" and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self.wait("boolean index")
        if name in COPIES:
            self._copy(name, args, kwargs)
        try:
            made = func(*args, **kwargs)
            return self.pin(made) if kwargs.get("pin_memory") else made
        except (DataDependentOutputException, DynamicOutputShapeException):
            return _of_some_size(name, args, kwargs)

    def _copy(self, name: str, args: Any, kwargs: Any) -> None:
        """Count a copy between the host and a GPU that is waited for."""
        if name == "aten::copy_":
            to, source = args[0].device.type, args[1].device.type
            blocks = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            host = args[0] if to == "cpu" else args[1]
        else:
            source = args[0].device.type
            to = torch.device(kwargs.get("device") or source).type
            blocks = not kwargs.get("non_blocking") or to == "cpu"  # into memory that is not pinned
            host = args[0]
        pinned = host.untyped_storage()._cdata in self.pinned or registered(host)
        if source != to and (blocks or not pinned):
            self.wait(f"copy {source} to {to}")


def _computes(func: Any) -> bool:
    """Whether an operator computes on the device: it is no view, and no question for a size, a stride or a device."""
    returns = func._schema.returns
    return not func.is_view and (not returns or any("Tensor" in str(one.type) for one in returns))


def _number(name: str, tensor: torch.Tensor) -> Any:
    if name != "aten::_local_scalar_dense":
        return True
    if tensor.dtype == torch.bool:
        return True
    if line().startswith(("worker/nonfinite.py", "optim/updater.py")):  # every update is finite
        return 0.0
    return 1.0 if tensor.dtype.is_floating_point else 1


def _of_some_size(name: str, args: Any, kwargs: Any) -> Any:
    first = args[0]
    if name == "aten::bincount":
        return torch.zeros(kwargs.get("minlength") or args[2], dtype=torch.int64, device=first.device)
    if name == "aten::index":
        return first.new_zeros((1, *first.shape[1:]))
    if name == "aten::nonzero":
        return first.new_zeros((1, first.dim()), dtype=torch.int64)
    raise NotImplementedError(name)
