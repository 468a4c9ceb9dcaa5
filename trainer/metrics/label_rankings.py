"""The average precision of each of several labels, over the samples of all workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import torch

from trainer.host.transfers import Queue
from trainer.metrics.ranking import COLUMNS, merged, ranked

MOST_SCORES = 1 << 19
"""Distinct scores of all labels and workers up to which average precisions are exact; beyond, neighbours are joined."""
LEAST_ROWS = 16
UNEVEN = 1024
"""Samples that a worker may have besides twice its share."""
CHUNK = 1 << 15
"""Samples that are ranked at a time."""


class RankingsShown:
    """Ranks one worker's samples by each label's score. Each worker fills its own places of the vector.

    Args:
        labels: how many there are.
        samples: of the whole validation; 0: it is not known.
        index, count: this worker's place, and how many workers there are.
    """

    def __init__(self, labels: int, samples: int, index: int, count: int) -> None:
        most = max(LEAST_ROWS, MOST_SCORES // (labels * count))
        share = min(samples, 2 * -(-samples // count) + UNEVEN)  # shares are whole batches
        self.rows = min(most, max(LEAST_ROWS, share)) if samples else most
        self.index, self.count = index, count
        self.tables = [np.zeros((0, COLUMNS)) for _ in range(labels)]
        self.seen: list[tuple[np.ndarray, np.ndarray]] = []
        self.batches = Queue(self._see)

    def add(self, outputs: torch.Tensor, labels: torch.Tensor, numbers: np.ndarray) -> None:
        """Take in a batch: outputs (N, K) and labels (N, K) of 0 and 1."""
        self.batches.put([outputs, labels])

    def _see(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.seen.append((outputs.numpy(), labels.numpy() > 0.5))
        if sum(len(part) for part, _ in self.seen) >= CHUNK:
            self._rank()

    def vector(self) -> torch.Tensor:
        """Return the rankings in this worker's places, (1 + count * K * rows * 4,); the first number is ``count``."""
        self.batches.finish()
        self._rank()
        places = np.zeros((self.count, len(self.tables), self.rows, COLUMNS))
        for label, table in enumerate(self.tables):
            places[self.index, label, : len(table)] = table
        return torch.from_numpy(np.concatenate([[0.0 if self.index else self.count], places.ravel()]))

    def _rank(self) -> None:
        if not self.seen:
            return
        scores, positive = (np.concatenate(part) for part in zip(*self.seen, strict=True))
        self.seen = []
        for label, table in enumerate(self.tables):
            finite = np.clip(np.nan_to_num(scores[:, label], nan=-np.inf), np.finfo(float).min, np.finfo(float).max)
            self.tables[label] = merged([table, ranked(finite, positive[:, label])], self.rows)


def average_precisions(labels: int, vector: torch.Tensor) -> np.ndarray:
    """Return the average precision of each label (K,), NaN of labels that no sample has.

    It is the mean, over the samples with the label, of the share of samples with the label among all whose score is at
    least as great.

    Args:
        vector: the sum of all workers' :meth:`RankingsShown.vector`.
    """
    numbers = vector.double().cpu().numpy()
    places = numbers[1:].reshape(round(numbers[0]), labels, -1, COLUMNS)
    return np.array([_average_precision(places[:, label].reshape(-1, COLUMNS)) for label in range(labels)])


def _average_precision(rows: np.ndarray) -> float:
    rows = rows[rows[:, 2] + rows[:, 3] > 0]  # the others are empty places
    if not rows[:, 2].sum():
        return float("nan")
    table = merged([rows], max(LEAST_ROWS, len(rows)))[::-1]
    hits, all_of_them = table[:, 2].cumsum(), (table[:, 2] + table[:, 3]).cumsum()
    return float((table[:, 2] * hits / all_of_them).sum() / hits[-1])


@dataclass(frozen=True)
class LabelCounts:
    """A validation's findings by label, (K,) each: how often a label was predicted rightly, was there, was predicted;
    and its average precision."""

    hits: np.ndarray
    labels: np.ndarray
    guesses: np.ndarray
    precisions: np.ndarray

    samples: ClassVar[Sequence[int]] = ()

    def arrays(self) -> dict[str, Any]:
        """Return the findings as arrays by name, for the validation's file."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
