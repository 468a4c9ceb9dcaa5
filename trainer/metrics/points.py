"""Some samples of a validation with their labels and outputs, and the worst of all; the same over any workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer.host.transfers import on_its_way

MOST = 1000
"""Samples that are shown, over all workers."""
WORST = 24
"""Samples of the greatest error that are listed besides."""


@dataclass(frozen=True)
class Points:
    """Samples of a validation: their numbers (P,), labels (P, K) and outputs (P, K); and the worst of all, the greatest
    error first."""

    numbers: np.ndarray
    labels: np.ndarray
    outputs: np.ndarray
    worst_numbers: np.ndarray
    worst_labels: np.ndarray
    worst_outputs: np.ndarray

    @property
    def samples(self) -> Sequence[int]:
        """The worst samples: of these the inputs and the files are kept."""
        return [int(number) for number in self.worst_numbers]

    def arrays(self) -> dict[str, Any]:
        """Return the samples as arrays by name, for the validation's file."""
        return {name: getattr(self, name) for name in NAMES}

    @staticmethod
    def of(arrays: Mapping[str, Any]) -> Points:
        """Make the samples of what :meth:`arrays` returned."""
        return Points(*(arrays[name] for name in NAMES))


NAMES = ("numbers", "labels", "outputs", "worst_numbers", "worst_labels", "worst_outputs")


class PointsShown:
    """Chooses the samples of one worker among several.

    Which are shown depends on a lot that follows from a sample's number alone, so that the choice is the same however
    samples are shared out. Each worker fills its own places of the vector. All is on the device of the outputs.

    Args:
        columns: K, the numbers of a sample.
        index, count: this worker's place, and how many workers there are.
    """

    def __init__(self, columns: int, index: int, count: int) -> None:
        self.columns, self.index, self.count = columns, index, count
        self.shown = self.worst = torch.zeros((0, 3 + 2 * columns), dtype=torch.float64)

    def add(self, outputs: torch.Tensor, labels: torch.Tensor, numbers: np.ndarray) -> None:
        """Take in a batch: outputs and labels (N,) or (N, K), the samples' indices in the data (N,)."""
        outputs, labels = outputs.reshape(-1, self.columns), labels.reshape(-1, self.columns)
        error = (outputs - labels).abs().amax(1, keepdim=True).nan_to_num(torch.finfo(torch.float64).max)
        about = on_its_way(torch.from_numpy(np.stack([numbers + 1.0, _lots(numbers)], 1)), outputs.device)
        rows = torch.cat([about, error, labels, outputs.nan_to_num()], 1)
        self.shown = _least(rows if not len(self.shown) else torch.cat([self.shown, rows]), 1, MOST)
        self.worst = _least(rows if not len(self.worst) else torch.cat([self.worst, rows]), 2, WORST)

    def vector(self) -> torch.Tensor:
        """Return the samples in this worker's places, (count * (MOST + WORST) * (3 + 2 K),)."""
        places = self.shown.new_zeros((self.count, MOST + WORST, 3 + 2 * self.columns))
        places[self.index, : len(self.shown)] = self.shown
        places[self.index, MOST : MOST + len(self.worst)] = self.worst
        return places.flatten()


def points_of(columns: int, vector: torch.Tensor) -> Points:
    """Make the :class:`Points` of all workers from the sum of their vectors."""
    places = vector.double().cpu().reshape(-1, MOST + WORST, 3 + 2 * columns)
    shown, worst = (
        _least(part[part[:, 0] > 0], by, most).numpy()
        for part, by, most in ((places[:, :MOST].flatten(0, 1), 1, MOST), (places[:, MOST:].flatten(0, 1), 2, WORST))
    )
    return Points(*_columns(shown, columns), *_columns(worst, columns))


def _columns(rows: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return rows[:, 0].astype(np.int64) - 1, rows[:, 3 : 3 + columns], rows[:, 3 + columns :]


def _lots(numbers: np.ndarray) -> np.ndarray:
    """A pseudo-random number from 0 to 1 for each sample's index, spread evenly (multiples of the golden ratio)."""
    lots: np.ndarray = numbers * 0.6180339887498949 % 1.0
    return lots


def _least(rows: torch.Tensor, by: int, most: int) -> torch.Tensor:
    """The rows of the lowest lots (``by`` 1), or of the greatest errors (2); of equal ones the lowest numbers first."""
    by_number = rows[rows[:, 0].argsort(stable=True)]
    return by_number[by_number[:, by].argsort(descending=by == 2, stable=True)][:most]
