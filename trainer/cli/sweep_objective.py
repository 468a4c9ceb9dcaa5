"""What a sweep wants of its jobs: the metrics that it compares, and their values in a job's points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.host import json_text
from trainer.metrics.best import falls
from trainer.run_folder.reset_files import POINTS

KEPT = 256
"""Bytes before the next ones to read that show whether the file is still the same."""


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


class Followed:
    """A metric of a run that goes on: only what was appended to its points since the last time is read."""

    def __init__(self, folder: Path, metric: str) -> None:
        self.file, self.metric = folder / POINTS, metric
        self.found: list[tuple[int, float]] = []
        self.at, self.last = 0, b""

    def points(self) -> list[tuple[int, float]]:
        """Return the epochs and values so far."""
        for line in self._appended().splitlines():
            if self.metric.encode() in line:
                with suppress(TypeError, ValueError, KeyError):
                    point = json_text.loads(line.decode(errors="replace"))
                    self.found.append((int(point.get("epoch", 0)), float(point["metrics"][self.metric])))
        return self.found

    def _appended(self) -> bytes:
        """The new whole lines; all lines of a file that was cut at a checkpoint, and written again."""
        try:
            with self.file.open("rb") as file:
                file.seek(self.at - len(self.last))
                if file.read(len(self.last)) != self.last:
                    self.found, self.at, self.last = [], 0, b""
                    file.seek(0)
                block = file.read()
        except OSError:  # it has no point yet
            return b""
        lines = block[: block.rfind(b"\n") + 1]
        self.at += len(lines)
        self.last = (self.last + lines)[-KEPT:]
        return lines


def points(folder: Path, metric: str) -> list[tuple[int, float]]:
    """The epochs and values of a metric in the points that a run has written so far."""
    return Followed(folder, metric).points()


def measured(folder: Path, wanted: Sequence[Objective]) -> dict[str, float]:
    """The best value of each objective in a job's points, by metric; those that it has not measured are missing."""
    best = {one.metric: one.best(value for _, value in points(folder, one.metric)) for one in wanted}
    return {metric: value for metric, value in best.items() if value is not None}
