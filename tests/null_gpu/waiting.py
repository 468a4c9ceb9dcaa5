"""``python -m tests.null_gpu.waiting``: waits for a null GPU in each way, and does what does not; prints the counts."""

from __future__ import annotations

import time
from collections import Counter

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.null_gpu import fakes
from tests.null_gpu.machine import leave
from tests.null_gpu.waits import Waits
from trainer.host.transfers import Arriving, on_its_way


def waited() -> dict[str, int]:
    """The waits by kind."""
    waits, until = Waits(), time.monotonic() + 60.0
    with fakes.in_place(1, waits), FakeTensorMode(allow_non_fake_inputs=True), waits:
        numbers = torch.ones(4, device="cuda")
        numbers.sum().item()
        numbers.to("cpu")
        numbers.to("cpu", non_blocking=True)
        numbers.cpu()
        torch.tensor([1.0], device="cuda")
        torch.ones(4).to("cuda", non_blocking=True)
        numbers[numbers > 0]
        torch.bincount(numbers.long(), minlength=3)
        numbers.nonzero()
        first, second = Arriving([numbers]), Arriving([numbers])
        second.read()
        assert first.there, "it was asked for earlier"
        first.read()
        third = Arriving([numbers])
        while not third.there:
            assert time.monotonic() < until
        torch.cuda.synchronize()
        on_its_way(torch.ones(4), "cuda")
        torch.empty(4, pin_memory=True).copy_(numbers, non_blocking=True)
    kinds = Counter[str]()
    for (_, kind, _), times in waits.found.items():
        kinds[kind] += times
    return dict(kinds)


if __name__ == "__main__":
    leave(waited())
