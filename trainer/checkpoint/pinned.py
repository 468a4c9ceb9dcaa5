"""Pinned memory for the copy of a state that lies on a GPU. The training does not wait while it is filled.

States of the memory, and who moves it:

    free       there was no checkpoint yet, or the writer has written the one before (:meth:`PinnedMemory.release`)
    filling    the process has asked the GPU for the copies and goes on (:meth:`PinnedMemory.fill`). The GPU changes no
               tensor before it is copied, because it works in the order of what it was asked for
    filled     the copies' events are done; the writer waits for this, in its thread

Memory that is not free is left to its writer, and the next copy gets another one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from trainer.errors import first_line
from trainer.host import memory
from trainer.host.transfers import recorded

POLL_S = 0.01
ALIGNED = 64
"""Bytes at whose multiples tensors begin."""


class PinnedMemory:
    """Memory of one process for its checkpoints. It is kept from one to the next, and grows when it has to.

    Attributes:
        hangs: the GPU does not come to the copies, and nobody waits for them any more.
    """

    hangs = False

    def __init__(self) -> None:
        self.whole: torch.Tensor | None = None
        self.free = True
        self.refused = ""

    def fill(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.cuda.Event]]:
        """Copy tensors of GPUs; returns the contiguous copies, and the events after which they have their values.

        Where so much memory cannot be pinned, this is said once, and the copies are waited for.
        """
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += -(-tensor.nbytes // ALIGNED) * ALIGNED
        whole = self._of_size(size)
        if whole is None:
            return [tensor.to("cpu", copy=True).contiguous() for tensor in tensors], []
        copies = []
        for start, tensor in zip(starts, tensors, strict=True):
            place = whole[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(place.copy_(tensor, non_blocking=True))
        self.free = False
        return copies, [recorded(device) for device in {tensor.device for tensor in tensors}]

    def wait(self, events: Sequence[torch.cuda.Event]) -> None:
        """Wait for the events of copies, in the writer's thread.

        Raises:
            OSError: the GPU hangs.
        """
        for event in events:
            with torch.cuda.device(event.device):  # or CUDA would open the first GPU for this thread, for some 500 MB
                while not event.query():
                    if self.hangs:
                        raise OSError("the GPU has not come to its copy")
                    time.sleep(POLL_S)

    def release(self) -> None:
        """Say that the copies are not needed any more. Can be called from any thread."""
        self.free = True

    def _of_size(self, size: int) -> torch.Tensor | None:
        """Return memory that is free and has so many bytes; None if it cannot be had."""
        if self.whole is not None and self.free and len(self.whole) >= size:
            return self.whole
        if self.refused:
            return None
        self.whole = None
        size = 1 << max(0, size - 1).bit_length()  # what torch pins at least
        try:
            if size > (left := memory.free()) // 2:
                raise RuntimeError(f"{left / 1e6:.0f} MB are free")
            self.whole = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            self.refused = first_line(error)
            print(
                f"{size / 1e6:.0f} MB of memory cannot be pinned for checkpoints ({self.refused}): the training waits "
                f"while they are copied",
                flush=True,
            )
        return self.whole
