"""DiLoCo (Douillard et al., 2023, arXiv:2311.08105): an outer optimizer for the parameters that workers share.

Between two exchanges each worker moves by its own optimizer. An exchange averages how far the workers have come from
the shared parameters. This mean difference is the gradient of an outer SGD with Nesterov's momentum, which moves the
shared parameters, and the workers go on from them. In a delayed exchange (streaming, arXiv:2501.18512) workers train on
while their differences travel, and then mix their own parameters with the shared ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

Wait = Callable[[], torch.Tensor]
"""Waits for an exchange under way, and returns the mean difference, flat."""
LARGEST = 127


def summed(values: torch.Tensor, sizes: Sequence[int], how: str) -> Wait:
    """Begin to sum a vector over the workers.

    Args:
        sizes: of its parts; each has a scale of its own in int8.
        how: ``full``, or what travels: ``bf16``, or ``int8``, of which workers send all numbers to all others.
    """
    if how == "int8":
        return _summed_in_bytes(values, sizes)
    sent = values.bfloat16() if how == "bf16" else values
    work = dist.all_reduce(sent, async_op=True)

    def wait() -> torch.Tensor:
        work.wait()
        return sent.to(values.dtype)

    return wait


def _summed_in_bytes(values: torch.Tensor, sizes: Sequence[int]) -> Wait:
    parts = values.split(list(sizes))
    scales = torch.stack([part.abs().amax() if len(part) else part.new_zeros(()) for part in parts]) / LARGEST
    sent = torch.empty_like(values, dtype=torch.int8)
    for part, scale, place in zip(
        parts, scales.clamp_min(torch.finfo(values.dtype).tiny), sent.split(list(sizes)), strict=True
    ):
        place.copy_((part / scale).round_())
    numbers = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    factors = [torch.empty_like(scales) for _ in numbers]
    works = [dist.all_gather(numbers, sent, async_op=True), dist.all_gather(factors, scales, async_op=True)]

    def wait() -> torch.Tensor:
        for work in works:
            work.wait()
        total = torch.zeros_like(values)
        for some, factor in zip(numbers, factors, strict=True):
            for sums, part, scale in zip(total.split(list(sizes)), some.split(list(sizes)), factor, strict=True):
                sums.add_(part * scale)
        return total

    return wait


class OuterOptimizer:
    """The shared parameters, and the outer SGD with Nesterov's momentum.

    Args:
        parameters: of this worker by name, equal on all workers.
        lr, momentum: of the outer steps.
        how: what travels, see :func:`summed`.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], lr: float, momentum: float, how: str) -> None:
        self.live, self.lr, self.momentum, self.how = parameters, lr, momentum, how
        self.shared = {name: p.detach().clone() for name, p in parameters.items()}
        self.buffers = {name: torch.zeros_like(p) for name, p in self.shared.items()} if momentum else {}

    @torch.no_grad()
    def agree(self) -> None:
        """Share the workers' parameters, which are equal now."""
        torch._foreach_copy_([*self.shared.values()], [*self.live.values()])

    @torch.no_grad()
    def begin(self, names: Sequence[str], share: Any) -> Wait:
        """Begin to average how far the workers have come with these parameters.

        Args:
            share: of this worker in the mean.
        """
        # In logical order: the elements of channels_last weights lie otherwise in memory.
        differences = [(self.shared[name] - self.live[name]).reshape(-1) for name in names]
        return summed(torch.cat(differences).mul_(share), [len(one) for one in differences], self.how)

    @torch.no_grad()
    def step(self, names: Sequence[str], mean: torch.Tensor, keep: float = 0.0) -> None:
        """Move these shared parameters, and go on from them.

        Args:
            mean: difference, flat. keep: share of the worker's own parameters that stays.
        """
        parts = mean.split([self.live[name].numel() for name in names])
        for name, part in zip(names, parts, strict=True):
            live, shared = self.live[name], self.shared[name]
            gradient = part.view(live.shape)
            if self.momentum:
                buffer = self.buffers[name].mul_(self.momentum).add_(gradient)
                gradient = gradient.add(buffer, alpha=self.momentum)
            shared.sub_(gradient, alpha=self.lr)
            live.lerp_(shared, 1 - keep) if keep else live.copy_(shared)

    def state(self) -> dict[str, Any]:
        """What all workers share, for :meth:`load`."""
        return {"shared": self.shared, "buffers": self.buffers}

    @torch.no_grad()
    def load(self, shared: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
        """Restore what :meth:`state` returned. A parameter or a momentum that it lacks begins anew."""
        self.agree()
        for own, saved in ((self.shared, shared), (self.buffers, buffers)):
            for name in own.keys() & saved.keys():
                own[name].copy_(saved[name])
