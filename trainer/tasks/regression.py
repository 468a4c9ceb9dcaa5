"""task=regression: one number or several for each sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.schema import MseLoss
from trainer.config.schema.task import RegressionTask
from trainer.data.source import Facts
from trainer.tasks.contract import REGRESSION
from trainer.tasks.summed import Summed

if TYPE_CHECKING:
    import torch

    from trainer.metrics.contract import Examined
    from trainer.metrics.sums import Shown
    from trainer.metrics.validation_file import Findings


class Regression(Summed):
    """Numbers: labels (N,) or (N, K), outputs (N, K); ``mae``, ``rmse`` and ``r2`` are means over the K numbers."""

    Options = RegressionTask
    labels = REGRESSION
    best = "rmse"
    curve = ("/rmse", "RMSE")

    def metrics(self, facts: Facts) -> list[str]:
        return ["loss", "mae", "rmse", "r2"]

    def loss(self) -> dict[str, Any]:
        return asdict(MseLoss())

    def sums(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return (4 K,): the absolute and the squared errors, the labels and their squares."""
        import torch

        outputs, labels = outputs.reshape(-1, self.columns), labels.reshape(-1, self.columns).double()
        error = outputs - labels
        return torch.cat([error.abs().sum(0), error.square().sum(0), labels.sum(0), labels.square().sum(0)])

    def summary(self, sums: torch.Tensor, samples: float) -> dict[str, float]:
        """Without ``r2`` where the labels of one of the K numbers are all equal."""
        absolute, squared, labels, squares = sums.reshape(4, -1)
        spread = squares - labels.square() / samples
        found = {"mae": float(absolute.mean() / samples), "rmse": math.sqrt(float(squared.mean() / samples))}
        if bool((spread > 1e-12 * squares).all()):  # less is rounding
            found["r2"] = float((1 - squared / spread).mean())
        return found

    def shown(self, index: int, count: int) -> Shown | None:
        from trainer.metrics.points import PointsShown

        return PointsShown(self.columns, index, count)

    def found(self, sums: torch.Tensor, vector: torch.Tensor) -> tuple[dict[str, float], Examined | None]:
        from trainer.metrics.points import points_of

        return {}, points_of(self.columns, vector)

    def pictures(self, folder: Path, which: str, found: Findings, names: Sequence[str], title: str) -> list[Path]:
        from trainer.tasks import number_pictures

        return number_pictures.draw(folder, which, found, names, title)
