"""An exponential moving average (EMA) of a model's weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from trainer.config.schema import EmaConfig
from trainer.host.sharded import local, put

NOTHING = -1
"""Value of ``step`` while the average holds no weights."""
PORTION = 1 << 23
"""Numbers that workers average at once: 64 MiB as float64."""


class SumsOverWorkers(Protocol):
    """Protocol of a strategy for averaged weights: sums over workers, and the workers that take part."""

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over workers of a float64 vector."""

    def members(self) -> tuple[int, int]:
        """This worker's index among the workers that take part, and their number."""


class AveragedWeights:
    """An EMA of the weights: after every update, ``average = decay * average + (1 - decay) * weights``.

    Floating buffers (batch-norm statistics) are averaged as well, since they must fit the averaged weights; other
    buffers are copied. Workers with equal models have equal averages without communication.

    Args:
        model: on its device, with its initial weights.
        decay: share of the average that stays in an update.
        warmup: the decay grows: ``min(decay, 1 - (1 + n / gamma) ** -power)`` in update n, from 0, as in timm's
            ModelEmaV3.

    Attributes:
        placed: the model has the averaged weights now, and ``average`` has the model's.
    """

    def __init__(
        self, model: nn.Module, decay: float, warmup: bool = False, gamma: float = 1.0, power: float = 2 / 3
    ) -> None:
        self.decay, self.warmup, self.gamma, self.power = decay, warmup, gamma, power
        self.model = model
        self.average = [t.clone() for t in self.live()]
        self.buffers = len(list(model.parameters()))
        self.names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
        self.step = 0
        self.placed = False

    def begin_anew(self) -> None:
        """Begin with the weights of the next update, not with the current ones, which may not be pulled yet."""
        self.step = NOTHING

    def live(self) -> list[torch.Tensor]:
        """The model's own tensors (not the averaged ones): its parameters, then its buffers."""
        return [t.detach() for t in (*self.model.parameters(), *self.model.buffers())]

    def decay_at(self, update: int) -> float:
        """The decay used in update number ``update``, from 0."""
        if not self.warmup:
            return self.decay
        return float(min(self.decay, 1.0 - (1.0 + update / self.gamma) ** -self.power))

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Add the model's weights after ``step`` updates to the average, once."""
        if step <= self.step:
            return
        weight = 1.0 if self.step == NOTHING else 1.0 - self.decay_at(step - 1)
        both = [(local(average), local(live)) for average, live in zip(self.average, self.live(), strict=True)]
        floating = [pair for pair in both if pair[0].is_floating_point()]
        others = [pair for pair in both if not pair[0].is_floating_point()]
        if floating:
            torch._foreach_lerp_([average for average, _ in floating], [live for _, live in floating], weight)
        if others:
            torch._foreach_copy_([average for average, _ in others], [live for _, live in others])
        self.step = step

    @torch.no_grad()
    def agree(self, strategy: SumsOverWorkers, mean: bool) -> None:
        """Average the EMA over workers before use: buffers come from the first worker, weights are the mean.

        An EMA is linear, so the mean of the workers' EMAs is the EMA of their mean weights.
        """
        index, count = strategy.members()
        if count == 1:
            return
        for places in _portions(self.average, 0 if mean else self.buffers):
            tensors = [self.average[place] for place in places]
            own = [
                t if p < self.buffers or index == 0 else torch.zeros_like(t)
                for p, t in zip(places, tensors, strict=True)
            ]
            sums = strategy.all_reduce_sum(torch.cat([t.double().reshape(-1) for t in own]))
            parts = sums.split([t.numel() for t in tensors])
            agreed = [part / count if p < self.buffers else part for p, part in zip(places, parts, strict=True)]
            torch._foreach_copy_(tensors, [part.view(t.shape) for part, t in zip(agreed, tensors, strict=True)])

    def state(self) -> dict[str, Any]:
        """The average, its tensors' names, and the number of updates in it, for :meth:`load`."""
        return {"step": self.step, "average": self.average, "names": self.names}

    @torch.no_grad()
    def load(self, step: int, average: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Restore what :meth:`state` returned, by name."""
        self.step = step
        saved = dict(zip(names, average, strict=True))
        for name, tensor in zip(self.names, self.average, strict=True):
            put(tensor, saved[name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context manager: the model has the averaged weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        self.placed = not self.placed
        for live, average in zip(map(local, self.live()), map(local, self.average), strict=True):
            kept = live.clone()
            live.copy_(average)
            average.copy_(kept)


def _portions(tensors: Sequence[torch.Tensor], first: int) -> Iterator[list[int]]:
    """Divide the places of tensors, from the first on, into lists of about ``PORTION`` numbers."""
    places, numbers = list[int](), 0
    for place in range(first, len(tensors)):
        places.append(place)
        numbers += tensors[place].numel()
        if numbers >= PORTION:
            yield places
            places, numbers = [], 0
    if places:
        yield places


def averaged_weights(model: nn.Module, ema: EmaConfig) -> AveragedWeights | None:
    """Make the averaged weights that the config asks for; None if its decay is null."""
    if ema.decay is None:
        return None
    return AveragedWeights(model, ema.decay, ema.warmup, ema.gamma, ema.power)
