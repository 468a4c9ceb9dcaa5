"""``python -m tests.null_gpu.reading``: reading processes feed a null GPU; prints the waits and the registered slots.

The question is ``{"registers": BOOL}``: whether slots are registered at all. The answer has ``waits``, each ``[kind,
line, count]``; ``right``, the batches that arrived as they were sent; ``held``, those that are held while their copies
are not done; ``registered`` slots while they are held, and ``left`` when the reader is closed and the last one
is freed; ``events``, the waits for data that the GPU has not come past.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from tests.null_gpu import fakes
from tests.null_gpu.waits import Waits
from trainer.data import shared_batches
from trainer.data.auto_num_workers import Growth, Host
from trainer.data.feed import Feed
from trainer.data.placement import Placement
from trainer.data.reader import Reading
from trainer.data.sampler import DistributedBatchSampler, EvaluationSampler
from trainer.data.source import Splits

SAMPLES, BATCH = 96, 8


class Numbered(torch.utils.data.Dataset[Any]):
    """Sample n is a picture of n."""

    def __len__(self) -> int:
        return SAMPLES

    def batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.from_numpy(indices)
        return numbers.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 8, 8).contiguous(), numbers


class Idle(Host):
    """A host with idle cores."""

    def idle(self) -> tuple[float, ...]:
        return (8 * self.seconds(),)


def registered() -> int:
    return int(ctypes.CDLL(None).null_gpu_registered(None))


def main(registers: bool) -> dict[str, Any]:
    """Read two epochs, of which the first ends with more reading processes."""
    waits, splits, right = Waits(), Splits(Numbered(), None), list[bool]()
    growth = Growth(2, 1, 4, lambda readers: 2, Idle(), updates=5)
    register = shared_batches.register if registers else lambda memory: None
    with fakes.in_place(1, waits), patch.object(shared_batches, "register", register):
        feed = Feed(
            splits,
            DistributedBatchSampler(SAMPLES, BATCH, shuffle=False),
            EvaluationSampler(0, BATCH),
            Placement(splits, torch.device("cuda:0"), torch.float32, False),
            reading=Reading(num_workers=2, pin_memory=True),
            growth=growth,
        )
        reader = feed.reader
        assert reader is not None and feed.idle is not None
        read = reader.read

        def compared(addresses: Any) -> Any:
            batches = read(addresses)
            for number in range(SAMPLES // BATCH):
                with _disable_current_modes():  # reading processes are forked without them
                    inputs, labels = next(batches)
                    wanted = torch.arange(BATCH * number, BATCH * (number + 1))
                    same = inputs == wanted.to(torch.uint8).view(-1, 1, 1, 1)  # type: ignore[operator]
                    right.append(bool(torch.equal(labels, wanted)) and bool(same.all()))
                yield inputs, labels

        with patch.object(reader, "read", compared), FakeTensorMode(allow_non_fake_inputs=True), waits:
            try:
                for epoch in range(2):
                    for _, batches in feed.updates(epoch):
                        list(batches)
                answer = {"right": right.count(True), "held": len(feed.place.leaving), "registered": registered()}
            finally:
                feed.close()
        feed.place.leaving.clear()
    found = [[kind, where, n] for (_, kind, where), n in waits.found.items()]
    return {**answer, "waits": found, "left": registered(), "events": len(feed.idle.pairs), "readers": growth.readers}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
