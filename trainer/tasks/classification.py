"""task=classification: one class for each sample, and a score for each class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.run_config import RunConfig
from trainer.config.schema.task import ClassificationTask
from trainer.data.source import Facts
from trainer.metrics.best import OF_CLASSES, best_of, falling
from trainer.tasks.contract import Task

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainer.metrics.contract import Objective
    from trainer.metrics.validation_file import Findings

TOP = 5
"""Classes that ``predict`` writes for a sample."""


class Classification(Task):
    """One class for each sample: labels (N,) from 0 to C - 1, scores (N, C)."""

    Options = ClassificationTask
    best = "acc1"
    lower = falling(OF_CLASSES)
    curve = ("acc", "accuracy")

    def metrics(self, facts: Facts) -> list[str]:
        """With one or two classes, ``acc5`` is ``acc1``."""
        return list(dict.fromkeys(("loss", "acc1", f"acc{best_of(facts.classes)}", *OF_CLASSES)))

    def check_model(
        self, config: RunConfig, loss: nn.Module, outputs: torch.Tensor | None, facts: Facts
    ) -> tuple[str, str]:
        from trainer.tasks import loss_probe

        if outputs is None:
            wanted = config.model.get("num_classes")
            outputs_of = wanted if isinstance(wanted, int) else facts.classes
            return "", loss_probe.denominator_of_classes(config, loss, facts.classes, outputs_of)
        concern = loss_probe.check_classes(config, loss, facts, outputs)
        return concern, loss_probe.denominator_of_classes(config, loss, facts.classes, outputs.shape[1])

    def objective(self, loss: nn.Module, facts: Facts, there: Sequence[int]) -> Objective:
        from trainer.metrics.classification import ClassObjective

        return ClassObjective(loss, facts.classes, there)

    def trial(self, facts: Facts, shape: Sequence[int] | None) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        classes = shape[0] if shape else facts.classes
        return torch.full((2, classes), 1.0 / classes), torch.tensor([0, min(1, classes - 1)])

    def scores(self, outputs: torch.Tensor) -> torch.Tensor:
        """Probabilities (N, C)."""
        return outputs.softmax(1)

    def header(self, names: Sequence[str], facts: Facts) -> list[str]:
        return [column for k in range(1, TOP + 1) for column in (f"class{k}", f"probability{k}")]

    def width(self, facts: Facts) -> int:
        return 2 * TOP

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return (N, 2 * TOP): the likeliest classes, then their probabilities; of fewer classes the rest are -1."""
        probabilities, classes = outputs.double().softmax(1).sort(stable=True, dim=1, descending=True)
        kept = min(TOP, outputs.shape[1])
        found = probabilities.new_full((len(outputs), 2 * TOP), -1.0)
        found[:, :kept] = classes[:, :kept].double()
        found[:, TOP : TOP + kept] = probabilities[:, :kept]
        return found

    def cells(self, row: Sequence[float], names: Sequence[str]) -> list[str]:
        found: list[str] = []
        for label, probability in zip(map(int, row[:TOP]), row[TOP:], strict=True):
            found.append(names[label] if 0 <= label < len(names) else "" if label < 0 else str(label))
            found.append(f"{probability:.6f}" if label >= 0 else "")
        return found

    def pictures(self, folder: Path, which: str, found: Findings, names: Sequence[str], title: str) -> list[Path]:
        from trainer.tasks import class_pictures

        return class_pictures.draw(folder, which, found, names, title)
