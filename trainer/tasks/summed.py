"""Tasks whose metrics follow from sums over samples: the base class of one's own tasks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainer.config.instantiate import blamed, call_target
from trainer.config.run_config import RunConfig
from trainer.data.source import Facts
from trainer.errors import UserError, failed, first_line
from trainer.tasks.contract import CLASSIFICATION, MULTI_LABEL, REGRESSION, Task

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainer.metrics.contract import Examined, Objective
    from trainer.metrics.sums import Shown

TRIED = 12
"""Samples of a batch on which the loss is tried before a run."""


class Summed(Task):
    """Base class of tasks whose metrics follow from sums over samples. They are exact over any number of workers.

    A subclass says with :meth:`sums` what is added up, and with :meth:`summary` which metrics follow from the sums.
    The model makes outputs (N, :meth:`Task.outputs`); where that is 1, (N,) will do.
    """

    def compared(self, outputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the loss gets: the model's outputs, and the targets that follow from the labels.

        By default labels of numbers and of sets in the shape and type of the outputs, and class numbers as they are.
        """
        if self.labels == CLASSIFICATION:
            return outputs, labels
        if labels.dim() == 1 and outputs.dim() == 2:
            outputs = outputs.squeeze(1)
        elif outputs.dim() == 1 and labels.dim() == 2:
            labels = labels.squeeze(1)
        return outputs, labels.to(outputs.dtype)

    @abstractmethod
    def sums(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return sums (M,) over the samples of a batch, all of which add up over batches and workers.

        Args:
            outputs: float64, as :meth:`compared` returns them. labels: of the data, floating ones as float64.
        """

    @abstractmethod
    def summary(self, sums: torch.Tensor, samples: float) -> dict[str, float]:
        """Return the metrics that follow from the sums (M,) of so many samples. ``loss`` is there already.

        A metric that these samples cannot tell is left out.
        """

    def shown(self, index: int, count: int) -> Shown | None:
        """Return what a validation keeps besides its sums (:mod:`trainer.metrics.points`); None: nothing."""
        return None

    def found(self, sums: torch.Tensor, vector: torch.Tensor) -> tuple[dict[str, float], Examined | None]:
        """Return further metrics, and the findings of a validation, from its sums and from what :meth:`shown` kept."""
        return {}, None

    def objective(self, loss: nn.Module, facts: Facts, there: Sequence[int]) -> Objective:
        from trainer.metrics.sums import SumsObjective

        self.prepare(facts)
        outputs, labels = self.example(facts)
        return SumsObjective(loss, self, len(self.sums(self.compared(outputs, labels)[0].double(), labels)))

    def prepare(self, facts: Facts) -> None:
        """Keep of the facts what the other methods need. Called in each worker, before :meth:`sums`."""
        self.columns = facts.classes

    def example(self, facts: Facts, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs and the labels of some samples, on which loss and metrics are tried before a run."""
        import torch

        draw = torch.Generator().manual_seed(seed)
        outputs = torch.rand(TRIED, self.outputs(facts), generator=draw) * 0.8 + 0.1
        if self.labels == CLASSIFICATION:
            return outputs, torch.arange(TRIED) * facts.classes // TRIED
        labels = torch.rand(TRIED, facts.classes, generator=draw)
        if self.labels == REGRESSION:
            return outputs, labels
        return outputs, (labels > 0.5).float() if self.labels == MULTI_LABEL else (labels[:, 0] > 0.5).float()

    def check_model(
        self, config: RunConfig, loss: nn.Module, outputs: torch.Tensor | None, facts: Facts
    ) -> tuple[str, str]:
        from trainer.metrics.criterion import OWN, RANDOM, SAMPLES, SUM, kind_among

        self.prepare(facts)
        self._check_outputs(config, outputs, facts)
        batches = [self.example(facts, seed) for seed in (1, 2)]
        what = f"loss ({config.loss.get('_target_')})"
        shapes = "outputs ({}) and targets ({})".format(*(_shape(t) for t in self.compared(*batches[0])))
        try:
            value = loss(*self.compared(*batches[0]))
        except Exception as error:
            target = str(config.loss.get("_target_"))
            arguments = {name: value for name, value in config.loss.items() if name != "_target_"}

            def call(some: Any) -> Any:
                return call_target({**some, "_target_": target}, "loss")(*self.compared(*batches[0]))

            wrong = blamed(call, arguments)
            what = f"loss.{wrong}={arguments[wrong]}" if wrong else what
            raise UserError(what, f"does not take {shapes}: {first_line(error)}", self.typed_loss()) from error
        kind = "" if value.dim() else kind_among(loss, batches, lambda o, t: loss(*self.compared(o, t)))
        if kind not in (SAMPLES, OWN, SUM, RANDOM):
            raise UserError(what, f"is not the mean over samples for {shapes}", self.typed_loss())
        self._check_sums(f"task._target_={config.task._target_}", facts)
        return "", kind

    def _check_sums(self, what: str, facts: Facts) -> None:
        """Refuse a task whose sums of a batch are not those of its two parts together, or whose metrics have other
        names than it says."""
        import torch

        outputs, labels = self.example(facts)
        labels = labels.double() if labels.is_floating_point() else labels
        outputs, cut = self.compared(outputs, labels)[0].double(), TRIED // 3
        try:
            whole, first, second = (
                self.sums(outputs[part], labels[part]).double() for part in (slice(None), slice(cut), slice(cut, None))
            )
            found = ["loss", *self.summary(whole, TRIED)]
        except Exception as error:
            raise failed(what, "sums or summary", self.sums, error) from error
        if whole.dim() != 1:
            why = f"its sums have the shape ({', '.join(map(str, whole.shape))}), and they are a vector (M,)"
            raise UserError(what, why, "return torch.stack([...])")
        if whole.shape != first.shape or not torch.allclose(whole, first + second):
            raise UserError(what, "its sums (M,) of a batch are not those of the batch's two parts added up")
        if strange := [name for name in found if name not in self.metrics(facts)]:
            raise UserError(what, f"its summary has {strange[0]}, which is not among its metrics")

    def _check_outputs(self, config: RunConfig, outputs: torch.Tensor | None, facts: Facts) -> None:
        """Refuse a model that makes another number of outputs than the task needs."""
        wanted = self.outputs(facts)
        if outputs is None or outputs.shape[1:] == (wanted,) or (wanted == 1 and outputs.dim() == 1):
            return
        num_classes = config.model.get("num_classes")
        what = f"model.num_classes={num_classes}" if num_classes else f"model ({config.model.get('_target_')})"
        raise UserError(
            what,
            f"makes outputs ({_shape(outputs)}) for {facts.source}, and task={self.name} needs (N, {wanted})",
            f"model.num_classes={wanted}" if num_classes else "",
        )

    def trial(self, facts: Facts, shape: Sequence[int] | None) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, labels = self.example(facts)
        return self.scores(self.compared(outputs, labels)[0]), labels

    def scores(self, outputs: torch.Tensor) -> torch.Tensor:
        """By default the outputs as they are."""
        return outputs

    def header(self, names: Sequence[str], facts: Facts) -> list[str]:
        """By default ``value``, or the names of several outputs."""
        outputs = self.outputs(facts)
        if len(names) == outputs:
            return list(names)
        return ["value"] if outputs == 1 else [f"value{number + 1}" for number in range(outputs)]

    def width(self, facts: Facts) -> int:
        return self.outputs(facts)

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """By default the scores, (N, W)."""
        return self.scores(outputs.double()).reshape(len(outputs), -1)

    def cells(self, row: Sequence[float], names: Sequence[str]) -> list[str]:
        return [f"{value:.8g}" for value in row]


def _shape(tensor: torch.Tensor) -> str:
    return ", ".join(["N", *map(str, tensor.shape[1:])]) if tensor.dim() > 1 else "N,"
