"""The metrics that follow from the counts or means of a whole validation: name, value and direction of each.

A metric that is added here is on the screen, in every file and at the trackers, and ``best.metric`` can name it. This
module imports no torch: the plan needs the names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np


class Measure(NamedTuple):
    """A metric: how its value follows, and whether less is better."""

    value: Callable[..., float]
    lower: bool = False


def macro_f1(hits: np.ndarray, labels: np.ndarray, guesses: np.ndarray) -> float:
    """The mean of F1 = 2 hits / (labels + guesses) over the classes that are a label or a guess."""
    there = labels + guesses > 0
    return float((2 * hits[there] / (labels + guesses)[there]).mean()) if there.any() else 0.0


OF_CLASSES: Mapping[str, Measure] = {"f1": Measure(macro_f1)}
"""Of a classification: from the hits, labels and guesses of each class, (C,) each."""
OF_PROBABILITIES: Mapping[str, Measure] = {
    "acc": Measure(lambda hits, absolute, squared: hits),
    "mae": Measure(lambda hits, absolute, squared: absolute, lower=True),
    "mse": Measure(lambda hits, absolute, squared: squared, lower=True),
    "rmse": Measure(lambda hits, absolute, squared: math.sqrt(squared), lower=True),
}
"""Of labels y of 0 and 1 and probabilities p: from the means over samples of hits at 0.5, of |p - y| and (p - y)^2."""


def lower(measures: Mapping[str, Measure]) -> tuple[str, ...]:
    """The names of the metrics of which less is better."""
    return tuple(name for name, measure in measures.items() if measure.lower)
