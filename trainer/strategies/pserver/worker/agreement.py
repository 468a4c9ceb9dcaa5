"""Makes buffers (such as batch-norm statistics) equal on all workers of a parameter server."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trainer.host.transfers import Arriving, on_its_way


@torch.no_grad()
def agree_on(
    buffers: Sequence[torch.Tensor], all_reduce_sum: Callable[[torch.Tensor], torch.Tensor], first: bool, average: bool
) -> None:
    """Make the buffers of all workers of a parameter server equal: the first one's, or their average. A collective
    call.

    Args:
        first: this is the first worker.
        average: those of floating point are averaged.
    """
    device = buffers[0].device
    parts = [
        b.detach().to(device, torch.float64).reshape(-1)
        if first or (average and b.is_floating_point())
        else torch.zeros(b.numel(), dtype=torch.float64, device=device)
        for b in buffers
    ]
    (whole,) = Arriving([torch.cat([torch.ones(1, dtype=torch.float64, device=device), *parts])]).read()
    sums = on_its_way(all_reduce_sum(whole), device)  # a GPU is waited for once, in between
    offset = 1
    for buffer in buffers:
        part = sums[offset : offset + buffer.numel()].view(buffer.shape)
        offset += buffer.numel()
        if average and buffer.is_floating_point():
            part = part / sums[0]
        buffer.copy_(part.to(buffer.dtype))
