"""Converts lines of metrics.jsonl to MLflow metrics, and finds out which of them the server has."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from trainer.host import json_text

Point = tuple[str, int, int, str]
"""Name, time, update and value."""


def metrics_of(lines: Sequence[bytes]) -> list[Any]:
    """Convert the points in lines of metrics.jsonl to MLflow Metric objects."""
    from mlflow.entities import Metric

    points = [json_text.loads(line) for line in lines]
    return [Metric(k, v, point["time"], point["step"]) for point in points for k, v in point["metrics"].items()]


def points_of(metrics: Iterable[Any]) -> Counter[Point]:
    """Count how often each point occurs among MLflow metrics."""
    return Counter(map(_point, metrics))


def _point(metric: Any) -> Point:
    """A point as it can be compared: a server keeps what is infinite as the greatest number."""
    value = max(-sys.float_info.max, min(sys.float_info.max, metric.value))
    return metric.key, int(metric.timestamp), int(metric.step), repr(float(value)) if value == value else "nan"


def without(metrics: Sequence[Any], there: Counter[Point]) -> list[Any]:
    """The MLflow metrics that are not among the points ``there``, which it uses up."""
    missing = []
    for metric in metrics:
        point = _point(metric)
        if there[point]:
            there[point] -= 1
        else:
            missing.append(metric)
    return missing


class Sent:
    """Decides for points that are written again, at another time, whether a server has as many of that name and update.

    Args:
        before: the points that metrics.jsonl holds before these.
        history: all points of a name that the server has.
    """

    def __init__(self, before: Iterable[Any], history: Callable[[str], Iterable[Any]]) -> None:
        self.written = Counter((m.key, int(m.step)) for m in before)
        self.history = history
        self.there: dict[str, Counter[int]] = {}

    def is_missing(self, metric: Any) -> bool:
        """Whether the next point must be sent; it then counts as sent."""
        name, step = metric.key, int(metric.step)
        if name not in self.there:
            self.there[name] = Counter(int(m.step) for m in self.history(name))
        self.written[name, step] += 1
        if self.written[name, step] <= self.there[name][step]:
            return False
        self.there[name][step] += 1
        return True
