"""task=binary: labels 0 and 1, and one logit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trainer.config.run_config import RunConfig
from trainer.config.schema import BinaryCrossEntropyLoss
from trainer.config.schema.task import BinaryTask
from trainer.data.source import Facts
from trainer.metrics.best import OF_PROBABILITIES, falling
from trainer.tasks.contract import BINARY, Task

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainer.metrics.contract import Objective


class Binary(Task):
    """Labels 0 and 1: labels (N,), the logit (N,) of label 1."""

    Options = BinaryTask
    labels = BINARY
    best = "auc"
    lower = falling(OF_PROBABILITIES)
    curve = ("/auc", "AUC")

    def metrics(self, facts: Facts) -> list[str]:
        return ["loss", "auc", *OF_PROBABILITIES]

    def loss(self) -> dict[str, Any]:
        return asdict(BinaryCrossEntropyLoss())

    def check_model(
        self, config: RunConfig, loss: nn.Module, outputs: torch.Tensor | None, facts: Facts
    ) -> tuple[str, str]:
        from trainer.tasks import loss_probe

        return "", loss_probe.denominator_of_logits(config, loss, facts, outputs)

    def objective(self, loss: nn.Module, facts: Facts, there: Sequence[int]) -> Objective:
        from trainer.metrics.binary import BinaryObjective

        return BinaryObjective(loss, facts.ceiling.get("auc"))

    def trial(self, facts: Facts, shape: Sequence[int] | None) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        return torch.tensor([0.25, 0.75]), torch.tensor([0, 1])

    def scores(self, outputs: torch.Tensor) -> torch.Tensor:
        """Probabilities (N,) of label 1."""
        return outputs.sigmoid()

    def header(self, names: Sequence[str], facts: Facts) -> list[str]:
        return ["probability"]

    def width(self, facts: Facts) -> int:
        return 1

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.double().sigmoid().reshape(-1, 1)

    def cells(self, row: Sequence[float], names: Sequence[str]) -> list[str]:
        return [f"{row[0]:.8g}"]
