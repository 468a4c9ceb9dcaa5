"""Sends batches from reading processes to the training process through reused shared memory.

One memfd has ``SLOTS`` slots of ``ROOM`` bytes for each reading process; pages exist where batches were written. A
byte per slot in ``occupied`` says whether the slot is free (0) or holds a batch (1). Only the slot's reading process
sets 1 (``put``, after it has written the batch). Only the training process sets 0 (``take``, when the last view of the
batch is freed). So no lock is needed, and a batch is never overwritten while a part of it is in use. A batch without a
free slot, or larger than ``ROOM``, is sent as torch sends it, which maps new memory: a sixth of the time.

For a GPU the training process registers each slot with CUDA when it first reads it (``cudaHostRegister``). The slot's
pages are page-locked from then on, and a batch is copied to the GPU from where the reading process wrote it. Whoever
copies a batch has to hold it until the copy is done, see :class:`trainer.data.placement.Placement`. The slot is
registered no more when the last of its batches is freed and it is no longer mapped.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import weakref
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from trainer.data.batch_inputs import Inputs
from trainer.errors import RunFailed

SLOTS = 64
"""Batches of one reading process that can be in memory at a time."""
ROOM = 2**30
"""Largest batch, in bytes."""
ALIGNED = 64


@dataclass(frozen=True)
class Placed:
    """Where a tensor lies in a slot of shared memory, with its dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    size: int

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of the slot's bytes ``memory`` (size of the slot,)."""
        part = memory[self.offset : self.offset + self.size].view(self.dtype)
        return part.as_strided(self.shape, self.strides)


@dataclass(frozen=True)
class Parcel:
    """Sent by a reading process instead of a batch: the slot that holds the batch, and where its tensors lie there.

    Attributes:
        slot: number of the slot; size: bytes of the batch.
        inputs: places of the inputs, one or several by name; labels: place of the labels (N,).
    """

    slot: int
    size: int
    inputs: Placed | dict[str, Placed]
    labels: Placed


class SharedBatches:
    """Slots of shared memory between the training process and the reading processes that it forks.

    Args:
        readers: number of reading processes.
        pinned: batches are page-locked, for copies to a GPU.

    Attributes:
        reader: number of this reading process.
    """

    def __init__(self, readers: int, pinned: bool = False) -> None:
        self.file = os.memfd_create("batches")
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, readers * SLOTS * ROOM)  # a file without content takes no memory
        self.occupied = mmap.mmap(-1, readers * SLOTS)
        self.maps: dict[tuple[int, bool], np.ndarray] = {}
        self.pinned = pinned
        self.reader = 0

    @staticmethod
    def possible() -> bool:
        """Whether this system has such shared memory and starts processes by fork."""
        return hasattr(os, "memfd_create") and multiprocessing.get_start_method() == "fork"

    def put(self, batch: Any) -> Any:
        """In a reading process: write a batch into a slot; returns its :class:`Parcel`, or the batch without room."""
        if not _is_of_tensors(batch):
            return batch
        inputs, labels = batch
        named: dict[str, torch.Tensor] = inputs if isinstance(inputs, dict) else {"": inputs}
        tensors = [*named.values(), labels]
        ends = list(accumulate(-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors))
        slot = self._free_slot()
        if slot is None or not 0 < ends[-1] <= ROOM:
            return batch
        memory = torch.from_numpy(self._mapped(slot, ends[-1]))
        placed = [_placed(tensor, start, memory) for tensor, start in zip(tensors, [0, *ends], strict=False)]
        self.occupied[slot] = 1
        *first, last = placed
        return Parcel(
            slot, ends[-1], dict(zip(named, first, strict=True)) if isinstance(inputs, dict) else first[0], last
        )

    def take(self, parcel: Parcel) -> tuple[Inputs, torch.Tensor]:
        """In the training process: return the batch of a parcel, as views of the slot's memory, page-locked if that is
        asked for."""
        memory = self._mapped(parcel.slot, parcel.size, self.pinned)[: parcel.size]
        weakref.finalize(memory, self._release, parcel.slot, os.getpid()).atexit = False
        whole = torch.from_numpy(memory)
        inputs = parcel.inputs
        found = {k: t.of(whole) for k, t in inputs.items()} if isinstance(inputs, dict) else inputs.of(whole)
        return found, parcel.labels.of(whole)

    def _release(self, slot: int, holder: int) -> None:
        if os.getpid() == holder:  # a process that was forked meanwhile has a copy of the holder's objects
            self.occupied[slot] = 0

    def _free_slot(self) -> int | None:
        first = self.reader * SLOTS
        free = self.occupied.find(b"\0", first, first + SLOTS)
        return None if free < 0 else free

    def _mapped(self, slot: int, size: int, pinned: bool = False) -> np.ndarray:
        """Map at least ``size`` bytes of a slot; ``pinned``: register them with CUDA."""
        key = (slot, pinned)
        if key not in self.maps or len(self.maps[key]) < size:
            self.maps.pop(key, None)  # registered no more before its pages are registered again
            mapped = self.maps[key] = np.frombuffer(mmap.mmap(self.file, size, offset=slot * ROOM), np.uint8)
            if pinned:
                register(mapped)
        return self.maps[key]


def register(memory: np.ndarray) -> None:
    """Page-lock memory (N,) uint8 for copies to a GPU, until the array is freed.

    Raises:
        RunFailed: CUDA cannot; with what to type instead.
    """
    runtime: Any = torch.cuda.cudart()
    address = memory.ctypes.data
    found = runtime.cudaHostRegister(address, memory.nbytes, 0)
    if int(found) != 0:
        raise RunFailed(
            f"CUDA cannot page-lock {memory.nbytes:,} bytes of the reading processes' batches "
            f"({runtime.cudaGetErrorString(found)}). Type data.pin_memory=false, which copies more slowly"
        )
    weakref.finalize(memory, _unregister, address, os.getpid()).atexit = False


def _unregister(address: int, holder: int) -> None:
    if os.getpid() == holder:  # a process that was forked meanwhile has no part in CUDA
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[attr-defined]


def _placed(tensor: torch.Tensor, start: int, memory: torch.Tensor) -> Placed:
    """Copy a tensor into the slot's memory from byte ``start`` on, with its strides."""
    if not (tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))):
        tensor = tensor.contiguous()
    where = Placed(tensor.dtype, tuple(tensor.shape), tensor.stride(), start, tensor.nbytes)
    where.of(memory).copy_(tensor)
    return where


def _is_of_tensors(batch: Any) -> bool:
    """Whether a batch is (inputs, labels) of plain CPU tensors without gradients."""
    if not isinstance(batch, tuple) or len(batch) != 2:
        return False
    inputs, labels = batch
    every = [*(inputs.values() if isinstance(inputs, dict) else [inputs]), labels]
    return all(
        type(one) is torch.Tensor and one.device.type == "cpu" and one.layout == torch.strided and not one.requires_grad
        for one in every
    )
