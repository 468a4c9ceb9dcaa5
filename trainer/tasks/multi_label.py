"""task=multi_label: a set of labels for each sample, with a logit for each label."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.schema import BinaryCrossEntropyLoss
from trainer.config.schema.task import MultiLabelTask
from trainer.data.source import Facts
from trainer.tasks.contract import MULTI_LABEL
from trainer.tasks.summed import Summed

if TYPE_CHECKING:
    import torch

    from trainer.metrics.contract import Examined
    from trainer.metrics.sums import Shown
    from trainer.metrics.validation_file import Findings


class MultiLabel(Summed):
    """Sets of labels: labels (N, K) of 0 and 1, logits (N, K)."""

    Options = MultiLabelTask
    options: MultiLabelTask
    labels = MULTI_LABEL
    best = "map"
    curve = ("/f1", "F1")

    def metrics(self, facts: Facts) -> list[str]:
        return ["loss", "f1", "f1_micro", "exact", "map"]

    def loss(self) -> dict[str, Any]:
        return asdict(BinaryCrossEntropyLoss())

    def prepare(self, facts: Facts) -> None:
        super().prepare(facts)
        unknown = facts.iterable or "val" in facts.estimated
        self.samples = 0 if unknown else max(facts.val_samples, facts.test_samples)

    def sums(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return (3 K + 1,): of each label the hits, the samples with the label, and those predicted to have it; the
        samples whose whole set is right."""
        import torch

        threshold = self.options.threshold
        wanted, found = labels > 0.5, outputs > math.log(threshold / (1 - threshold))
        counts = [(wanted & found).sum(0), wanted.sum(0), found.sum(0), (wanted == found).all(1).sum().reshape(1)]
        return torch.cat(counts).double()

    def summary(self, sums: torch.Tensor, samples: float) -> dict[str, float]:
        """``f1`` is the mean over labels that a sample has or is predicted to have; ``exact`` the share of whole sets
        that are right."""
        hits, wanted, found = sums[:-1].reshape(3, -1)
        there = wanted + found > 0
        by_label = (2 * hits / (wanted + found))[there]
        together = float((wanted + found).sum())
        return {
            "f1": float(by_label.mean()) if len(by_label) else 0.0,
            "f1_micro": 2 * float(hits.sum()) / together if together else 0.0,
            "exact": float(sums[-1]) / samples,
        }

    def shown(self, index: int, count: int) -> Shown:
        from trainer.metrics.label_rankings import RankingsShown

        return RankingsShown(self.columns, self.samples, index, count)

    def found(self, sums: torch.Tensor, vector: torch.Tensor) -> tuple[dict[str, float], Examined]:
        """Return ``map``, the mean of the average precision over the labels that a sample has, and the counts."""
        import numpy as np

        from trainer.metrics.label_rankings import LabelCounts, average_precisions

        precisions = average_precisions(self.columns, vector)
        there = precisions[np.isfinite(precisions)]
        hits, wanted, guesses = sums[:-1].numpy().reshape(3, -1)
        return {"map": float(there.mean())} if len(there) else {}, LabelCounts(hits, wanted, guesses, precisions)

    def scores(self, outputs: torch.Tensor) -> torch.Tensor:
        """Probabilities (N, K)."""
        return outputs.sigmoid()

    def header(self, names: Sequence[str], facts: Facts) -> list[str]:
        return ["labels", *(names if len(names) == facts.classes else map(str, range(facts.classes)))]

    def cells(self, row: Sequence[float], names: Sequence[str]) -> list[str]:
        """The names of the labels of the set, separated by ``; ``, and the probability of each label."""
        called = names if len(names) == len(row) else [str(number) for number in range(len(row))]
        chosen = [name for name, likely in zip(called, row, strict=True) if likely > self.options.threshold]
        return ["; ".join(chosen), *(f"{likely:.6f}" for likely in row)]

    def pictures(self, folder: Path, which: str, found: Findings, names: Sequence[str], title: str) -> list[Path]:
        from trainer.tasks import label_pictures

        return label_pictures.draw(folder, which, found, names, title)
