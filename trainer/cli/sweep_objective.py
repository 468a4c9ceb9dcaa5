"""What a sweep wants of its jobs: the metrics that it compares, and their values in a job's points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.metrics.best import falls
from trainer.run_folder.points import read_points


@dataclass(frozen=True)
class Objective:
    """A metric, and whether less of it is better."""

    metric: str
    is_less_better: bool

    def best(self, values: Iterable[float]) -> float | None:
        """The best of some values; None: there is no number among them."""
        numbers = [value for value in values if not math.isnan(value)]
        return None if not numbers else min(numbers) if self.is_less_better else max(numbers)


def objectives(asked: str | Sequence[str] | None, watched: str, lower: Mapping[str, bool]) -> tuple[Objective, ...]:
    """The objectives of a sweep.

    Args:
        asked: ``sweep.objective``: metrics, each with ``max`` or ``min`` before it, or by its name.
        watched: the metric that marks a job's best model, for None. lower: of metrics that say so, whether less is
        better.
    """
    found = []
    for one in [watched] if asked is None else [asked] if isinstance(asked, str) else asked:
        way, _, metric = one.strip().rpartition(" ")
        found.append(Objective(metric, way == "min" if way else falls(metric, lower)))
    return tuple(found)


def points(folder: Path, metric: str) -> list[tuple[int, float]]:
    """The epochs and values of a metric in the points that a run has written so far."""
    found = []
    for point in read_points(folder, metric):
        with suppress(TypeError, ValueError, KeyError):
            found.append((int(point.get("epoch", 0)), float(point["metrics"][metric])))
    return found


def measured(folder: Path, wanted: Sequence[Objective]) -> dict[str, float]:
    """The best value of each objective in a job's points, by metric; those that it has not measured are missing."""
    best = {one.metric: one.best(value for _, value in points(folder, one.metric)) for one in wanted}
    return {metric: value for metric, value in best.items() if value is not None}
