"""The metrics of a validation: their values and directions, and what they decide (best model, rate, early stop).

A metric that is added to ``OF_CLASSES`` or ``OF_PROBABILITIES`` is on the screen, in every file and at the trackers,
and ``best.metric`` can name it. This module imports no torch: the plan needs the names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.config.keys import nearest
from trainer.wording import counted

if TYPE_CHECKING:
    import numpy as np

FALLING = ("loss", "mae", "mse")
"""Endings of metrics of which less is better (of rmse, too)."""
WORDS = {
    "accuracy": ("acc1", "acc"),
    "acc": ("acc1", "acc"),
    "1": ("acc1",),
    "accuracy1": ("acc1",),
    "5": ("acc5",),
    "accuracy5": ("acc5",),
    "rocauc": ("auc",),
    "f1score": ("f1",),
    "error": ("loss",),
}
"""Other words for metrics."""
NOBODY: Mapping[str, bool] = {}
"""No metric of a user's that says whether less is better."""
RAW, AVERAGED = "val/", "val_ema/"
"""Where a validation's metrics begin: of the model itself, and of the moving average of its weights."""
BEFORE_NAME = re.compile(r"((?:.*/|(?:val|valid|validation|ema|val_ema)[_.-])?)(.*)", re.DOTALL | re.IGNORECASE)
"""What a word for a metric may begin with, and the metric: ``val/``, ``test/``, ``val_``, ``val_ema.``."""
TESTED = "test/"
"""Where the metrics of the test data begin."""


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


def falling(measures: Mapping[str, Measure]) -> tuple[str, ...]:
    """The names of the metrics of which less is better."""
    return tuple(name for name, measure in measures.items() if measure.lower)


def falls(metric: str, lower: Mapping[str, bool] = NOBODY) -> bool:
    """Whether a metric gets better as it falls (a loss), not as it rises.

    Args:
        lower: of the user's own metrics whose class says so, whether less is better; of others the name tells.
    """
    return lower.get(metric, metric.endswith(FALLING))


def best_of(classes: int) -> int:
    """The number of best guesses that ``acc5`` counts: 5, or all classes but one if there are fewer than 5 (3 classes:
    ``acc2``)."""
    return 5 if classes >= 5 else max(1, classes - 1)


def names(measured: Collection[str], averaged: bool, own: Collection[str] = ()) -> list[str]:
    """All names that ``best.metric`` can have: ``val/NAME``, with ``averaged`` also ``val_ema/NAME``.
    ``measured``: the names of the task's metrics; ``own``: of the user's."""
    everything = [*measured, *own]
    return [prefix + name for prefix in ((RAW, AVERAGED) if averaged else (RAW,)) for name in everything]


def meant(metric: str, names: Collection[str]) -> str:
    """The name for ``best.metric`` that a user's word for a metric means (such as ``accuracy``); '' if there is none.

    The metrics are compared without what their names begin with, which would make all of them alike.

    Args:
        names: of the metrics that a validation measures, without ``val/``.
    """
    before, word = BEFORE_NAME.match(metric).groups()  # type: ignore[union-attr]
    plain = word.lower().replace("_", "").replace("-", "").replace("top", "")
    known = [name for name in (word, *WORDS.get(plain, ())) if name in names]
    found = known[0] if known else nearest(word, names, 0.7)
    return found and (AVERAGED if "ema" in before.lower() else RAW) + found


def unmeasured(metric: str) -> str:
    """The sentence about a validation that could not measure the metric which marks the best model."""
    cause = (
        ", because all labels of the validation data are the same" if metric.endswith(("/auc", "/auc_share")) else ""
    )
    return (
        f"ATTENTION: {metric} cannot be measured{cause}; no best model is chosen by it (best.metric=val/loss goes "
        f"by the loss)"
    )


class Best:
    """Keeps the best value so far of one metric.

    Args:
        metric: e.g. ``val/loss``.
        min_delta: a value counts as better only when it is better by more than this.
        lower: see ``falls``.
    """

    def __init__(self, metric: str, min_delta: float = 0.0, lower: Mapping[str, bool] = NOBODY) -> None:
        self.metric, self.min_delta, self.lower = metric, min_delta, lower
        self.value: float | None = None
        self.step = 0

    @property
    def falls(self) -> bool:
        """Whether this metric gets better as it falls."""
        return falls(self.metric, self.lower)

    def improved(self, step: int, value: float | None) -> bool:
        """Take in a new value; returns whether it is the best so far. None (not measured) and NaN never are."""
        if value is None or math.isnan(value):
            return False
        gain = 0.0 if self.value is None else (self.value - value if self.falls else value - self.value)
        if self.value is not None and not gain > self.min_delta:
            return False
        self.value, self.step = value, step
        return True

    def state(self) -> tuple[float | None, int]:
        """The best value and its step, for :meth:`load`."""
        return self.value, self.step

    def load(self, state: tuple[float | None, int]) -> None:
        """Restore what :meth:`state` returned."""
        self.value, self.step = state


class EarlyStop:
    """Decides when to end a run whose metric has stopped getting better.

    Args:
        patience: validations in a row without a better value after which it stops.
    """

    def __init__(self, metric: str, patience: int, min_delta: float, lower: Mapping[str, bool] = NOBODY) -> None:
        self.best = Best(metric, min_delta, lower)
        self.patience, self.waited = patience, 0

    def state(self) -> dict[str, Any]:
        """The best value and the validations waited since, for :meth:`load`."""
        return {"best": self.best.state(), "waited": self.waited, "metric": self.best.metric}

    def load(self, best: tuple[float | None, int], waited: int, metric: str) -> None:
        """Restore what :meth:`state` returned; nothing if it is of another metric."""
        if metric == self.best.metric:
            self.best.load(best)
            self.waited = waited

    def forget(self) -> None:
        """Forget the best value and the validations since."""
        self.waited = 0
        self.best.load((None, 0))

    def why(self, step: int, metrics: Mapping[str, float]) -> str:
        """Take in a validation; returns the reason to stop the run, or ''."""
        self.waited = 0 if self.best.improved(step, metrics.get(self.best.metric)) else self.waited + 1
        return self.reason(step)

    def reason(self, step: int) -> str:
        """The reason to stop the run after the validation at update ``step``, which was taken in last, or ''."""
        metric = self.best.metric
        if self.waited < self.patience:
            return ""
        word = "fallen" if falls(metric, self.best.lower) else "risen"
        by = f" by more than {self.best.min_delta:g}" if self.best.min_delta else ""
        so_far = (
            "never was a number"
            if self.best.value is None
            else f"best {self.best.value:.5f} at update {self.best.step}"
        )
        return (
            f"early stop at update {step}: {metric} has not {word}{by} for {counted(self.waited, 'validation')} "
            f"({so_far})"
        )
