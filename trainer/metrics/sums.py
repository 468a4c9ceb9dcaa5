"""Metrics that follow from sums over samples: they add up exactly over batches, log lines and workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from trainer.host.transfers import on_its_way
from trainer.metrics.contract import Examined, KeptBatches, Loss
from trainer.metrics.criterion import Criterion
from trainer.metrics.exchange import Total, summed

HEAD = 2
"""The loss times its denominator, and the denominator, come first in a vector of sums; the number of samples last."""
Sum = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Sums (M,) over the samples of outputs and labels."""


class Shown(Protocol):
    """Protocol of what a validation keeps besides its sums, as a vector of fixed length that adds up over workers."""

    def add(self, outputs: torch.Tensor, labels: torch.Tensor, numbers: np.ndarray) -> None:
        """Take in a batch, with its samples' indices (N,) in the validation data. On a GPU, wait for nothing."""

    def vector(self) -> torch.Tensor:
        """Return the vector. Each worker fills places of its own; the other places are 0."""


class Measure(Protocol):
    """Protocol of the part of a task that :class:`SumsObjective` needs; see :class:`trainer.tasks.summed.Summed`."""

    def compared(self, outputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the loss gets: outputs and targets."""

    def sums(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return sums (M,) over samples."""

    def summary(self, sums: torch.Tensor, samples: float) -> dict[str, float]:
        """Return the metrics of the sums (M,)."""

    def shown(self, index: int, count: int) -> Shown | None:
        """Return what a validation keeps besides, for worker ``index`` of ``count``; None: nothing."""

    def found(self, sums: torch.Tensor, vector: torch.Tensor) -> tuple[dict[str, float], Examined | None]:
        """Return further metrics and findings of the sums (M,) and the sum of all workers' :meth:`Shown.vector`."""


class SumsObjective:
    """The :class:`trainer.metrics.contract.Objective` of metrics that are sums over samples.

    A vector of sums is float64: loss times denominator, denominator, the measure's sums (M,), of a validation what it
    shows, and the number of samples.

    Args:
        width: M, the number of the measure's sums.
    """

    def __init__(self, loss: nn.Module, measure: Measure, width: int) -> None:
        self.loss = loss if isinstance(loss, Criterion) else Criterion(loss)
        self.measure, self.width = measure, width

    def forward(
        self, model: nn.Module, inputs: Any, labels: torch.Tensor, denominator: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model on a batch; returns the mean loss, 0 without a denominator, and the outputs."""
        outputs = model(inputs)
        if outputs.dtype in (torch.bfloat16, torch.float16):  # labels are not to be rounded to 16 bits
            outputs = outputs.float()
        outputs, targets = self.measure.compared(outputs, labels)
        return self.loss(outputs, targets, denominator, model.training), outputs

    def meter(self) -> SumsMeter:
        """Return a new, empty meter for training."""
        return SumsMeter(self.measure.sums, self.width)

    def exam(self, index: int, count: int) -> SumsExam:
        """Return a new, empty exam for a whole validation."""
        return SumsExam(self.meter(), self.measure.shown(index, count))

    def add(self, sums: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Return the sums of the samples of both, on the device of the first."""
        return sums + others.to(sums.device)

    def over_workers(
        self, total: Total, index: int, count: int, parts: Sequence[torch.Tensor], plain: Sequence[torch.Tensor] = ()
    ) -> list[torch.Tensor]:
        """Return each of the parts over all workers, then each plain vector: one collective call."""
        return summed(total, parts, plain)

    def summary(self, sums: torch.Tensor, epoch: torch.Tensor | None = None) -> dict[str, float]:
        """Compute the loss and the measure's metrics from the sums of one worker, or of all added up."""
        flat = sums.cpu()
        samples, (loss, denominator) = flat[-1].item(), flat[:HEAD].tolist()
        if not samples:
            return {}
        found = {"loss": loss / denominator} if denominator else {}
        return {**found, **self.measure.summary(flat[HEAD : HEAD + self.width], samples)}

    def validation(self, sums: torch.Tensor) -> dict[str, float]:
        """Compute the metrics of a whole validation: ``summary``, and those of what it shows."""
        metrics = self.summary(sums)
        return metrics and {**metrics, **self._found(sums)[0]}

    def kept(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the sums of a whole validation, all of which :meth:`examined` needs."""
        return sums

    def examined(self, sums: torch.Tensor) -> Examined | None:
        """Return what a whole validation shows besides its metrics."""
        return self._found(sums)[1]

    def _found(self, sums: torch.Tensor) -> tuple[dict[str, float], Examined | None]:
        flat = sums.cpu()
        return self.measure.found(flat[HEAD : HEAD + self.width], flat[HEAD + self.width : -1])


class SumsMeter(KeptBatches):
    """The meter of sums: keeps the batches seen, and computes only when the sums are asked for.

    Args:
        sum: makes the sums (M,) of outputs and labels in float64. width: M.
    """

    def __init__(self, sum: Sum, width: int) -> None:
        super().__init__()
        self.sum, self.width = sum, width

    def sums(self, device: Any = "cpu") -> torch.Tensor:
        """Return the vector of sums, on the device of the batches, and empty the meter."""
        seen, self.seen = self.seen, []
        if not seen:
            return torch.zeros(HEAD + self.width + 1, dtype=torch.float64)
        place = seen[0][0].device
        found, denominators, count = torch.zeros(1 + self.width, dtype=torch.float64, device=place), 0.0, 0.0
        for loss, outputs, labels, samples, denominator in seen:
            own = self.sum(outputs.double(), labels.double() if labels.is_floating_point() else labels)
            found += torch.cat([(loss.double() * denominator).reshape(1), own.double().to(place)])
            denominators, count = denominators + denominator, count + samples
        known = on_its_way(torch.tensor([denominators, count], dtype=torch.float64), place)
        return torch.cat([found[:1], known[:1], found[1:], known[1:]])


class SumsExam:
    """The exam of sums: those of one worker's share of a validation, and what the validation shows besides."""

    def __init__(self, meter: SumsMeter, shown: Shown | None) -> None:
        self.meter, self.shown = meter, shown
        self.sum: torch.Tensor | None = None

    def add(
        self, loss: Loss | torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor, samples: int, numbers: np.ndarray
    ) -> None:
        """Add a validation batch, with its samples' indices (N,) in the validation data."""
        self.meter.add(loss, outputs, labels, samples)
        sums = self.meter.sums()
        self.sum = sums if self.sum is None else self.sum + sums
        if self.shown is not None:
            self.shown.add(outputs.detach().double(), labels.double(), numbers)

    def sums(self) -> torch.Tensor:
        """Return the vector of the sums, with what is shown before the number of samples."""
        whole = self.meter.sums() if self.sum is None else self.sum
        rest = [] if self.shown is None else [on_its_way(self.shown.vector(), whole.device)]
        return torch.cat([whole[:-1], *rest, whole[-1:]])
