"""The confusion counts and the worst mistakes of a validation, as one vector that adds up exactly over workers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer.host import json_text
from trainer.host.transfers import on_its_way

MOST_CLASSES = 102
"""Up to this number of classes, each pair of label and guess is counted; beyond, hits, labels and guesses of each
class."""
WORST = 24
"""Mistakes that are remembered."""
FIELDS = 5
"""Of a mistake: loss, number of the sample, label, guess, confidence in the guess."""


@dataclass(frozen=True)
class Mistake:
    """A wrong guess of the model in a validation.
    The sample's index in the validation data, its label, the guess (-1 if outputs are NaN), the probability that the
    model gave the guess, and the loss: -log of the probability that it gave the label."""

    number: int
    label: int
    guess: int
    confidence: float
    loss: float


@dataclass(frozen=True)
class Examination:
    """The findings of a validation by class: metrics, confusion matrix, worst mistakes.

    Attributes:
        metrics: by name. hits, labels, guesses: (C,) how often a class was guessed rightly, was the label, was guessed.
        confusion: (C, C + 1) of labels and guesses, its last column for outputs that are no class; None of many
        classes. mistakes: the worst, by falling loss.
    """

    metrics: dict[str, float]
    hits: np.ndarray
    labels: np.ndarray
    guesses: np.ndarray
    confusion: np.ndarray | None
    mistakes: tuple[Mistake, ...]

    @property
    def samples(self) -> list[int]:
        """The validation samples of the mistakes, in their order."""
        return [mistake.number for mistake in self.mistakes]

    def arrays(self) -> dict[str, Any]:
        """Return the findings as arrays, for the validation's file."""
        rows = [[m.number, m.label, m.guess, m.confidence, m.loss] for m in self.mistakes]
        found: dict[str, Any] = {
            "metrics": json.dumps(self.metrics),
            "hits": self.hits,
            "labels": self.labels,
            "guesses": self.guesses,
            "mistakes": np.array(rows, dtype=np.float64).reshape(-1, FIELDS),
        }
        return found if self.confusion is None else {**found, "confusion": self.confusion}

    @staticmethod
    def of(arrays: Mapping[str, Any]) -> Examination:
        """Make the findings of what :meth:`arrays` returned."""
        rows = arrays["mistakes"].tolist()
        return Examination(
            json_text.loads(str(arrays["metrics"])),
            arrays["hits"],
            arrays["labels"],
            arrays["guesses"],
            arrays.get("confusion"),
            tuple(Mistake(int(n), int(label), int(guess), c, loss) for n, label, guess, c, loss in rows),
        )


def guessed(outputs: torch.Tensor, classes: int) -> torch.Tensor:
    """The guess of each row of scores, as the confusion counts take it; ``classes`` if it is no class, or a score is
    NaN.

    Args:
        outputs: (N, D) scores, D at least ``classes``. A row with one that is not a number is no guess.
    """
    best = outputs.argmax(1)
    return best.masked_fill(outputs.isnan().any(1) | (best >= classes), classes)


class Tally:
    """Counts guesses by class and keeps the worst mistakes, for one worker among several.

    All is kept on the device of the outputs, in tensors of fixed sizes: a size that depends on values, such as the
    number of mistakes, would make the host wait for a GPU.

    Args:
        classes: of the data.
        index, count: this worker's number, and how many there are: each has its own place for its mistakes.
    """

    def __init__(self, classes: int, index: int = 0, count: int = 1) -> None:
        self.classes = classes
        self.index = index
        self.count = count
        self._begin(torch.device("cpu"))

    def _begin(self, device: torch.device) -> None:
        """Begin to count on a device."""
        self.counts = torch.zeros(_counts(self.classes), dtype=torch.float64, device=device)
        self.worst = torch.zeros((WORST, FIELDS), dtype=torch.float64, device=device)
        self.empty = True

    def add(self, outputs: torch.Tensor, labels: torch.Tensor, numbers: np.ndarray) -> None:
        """Count a batch: outputs (N, D), labels (N,), the samples' indices in the data (N,)."""
        if self.empty and outputs.device != self.counts.device:
            self._begin(outputs.device)
        self.empty = False
        guesses = guessed(outputs, self.classes)
        wrong = guesses != labels
        if self.classes <= MOST_CLASSES:
            self.counts += _counted(labels * (self.classes + 1) + guesses, len(self.counts))
        else:
            hits = _counted(labels, self.classes, ~wrong)
            guess_counts = _counted(guesses, self.classes + 1)[: self.classes]
            self.counts += torch.cat([hits, _counted(labels, self.classes), guess_counts])
        logs = outputs.double().log_softmax(1)
        losses = -logs.gather(1, labels.unsqueeze(1)).squeeze(1)
        confidence = logs.amax(1).exp()
        where = on_its_way(torch.from_numpy(numbers), labels.device)
        rows = torch.stack([losses.nan_to_num(torch.inf), where, labels, guesses, confidence.nan_to_num(0.0)], 1)
        # of a mistake the loss is at least log 2, so that rows of 0 come last
        mistakes = rows[wrong] if _sizes_may_vary(rows) else torch.where(wrong.unsqueeze(1), rows, 0.0)
        self.worst = _worst(torch.cat([self.worst, mistakes]))

    def vector(self) -> torch.Tensor:
        """Return the tally as a vector that adds up over workers.
        It has counts, then ``WORST`` rows of a mistake for each worker, of which this one fills its own."""
        places = self.worst.new_zeros((self.count, WORST, FIELDS))
        places[self.index] = self.worst
        places[..., 0].clamp_(max=torch.finfo(torch.float64).max)  # a sum with infinity in it is still to be read
        return torch.cat([self.counts, places.flatten()])

    def by_class(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The hits, labels and guesses of each class, (C,) each."""
        counts = self.counts.numpy()
        if self.classes > MOST_CLASSES:
            hits, labels, guesses = counts.reshape(3, self.classes)
            return hits, labels, guesses
        matrix = counts.reshape(self.classes, self.classes + 1)
        return np.diagonal(matrix), matrix.sum(1), matrix.sum(0)[: self.classes]

    def examination(self, metrics: dict[str, float]) -> Examination:
        """Make the :class:`Examination` of all counts and mistakes, with these metrics."""
        hits, labels, guesses = (part.astype(np.int64) for part in self.by_class())
        matrix = None
        if self.classes <= MOST_CLASSES:
            matrix = self.counts.numpy().reshape(self.classes, self.classes + 1).astype(np.int64)
        return Examination(
            metrics, hits, labels, guesses, matrix, tuple(self._mistake(row) for row in self.worst.tolist())
        )

    def _mistake(self, row: list[Any]) -> Mistake:
        loss, number, label, guess, confidence = row
        return Mistake(int(number), int(label), -1 if guess == self.classes else int(guess), confidence, loss)


def tally_of(classes: int, total: torch.Tensor) -> Tally:
    """Make the confusion counts and worst mistakes of all workers (:class:`Tally`) from the sum of their vectors."""
    tally, counted = Tally(classes), _counts(classes)
    tally.counts = total[:counted].double().cpu()
    rows = total[counted:].double().cpu().reshape(-1, FIELDS)
    tally.worst = _worst(rows[rows[:, 2] != rows[:, 3]])  # an empty place and a right guess have label 0 and guess 0
    return tally


def _sizes_may_vary(tensor: torch.Tensor) -> bool:
    """Whether sizes that depend on values cost no wait; where they do not, less is computed with them."""
    return tensor.device.type == "cpu"


def _counted(numbers: torch.Tensor, length: int, chosen: torch.Tensor | None = None) -> torch.Tensor:
    """How often each number from 0 to ``length - 1`` is there, as float64 on the device of the numbers.

    Args:
        chosen: (N,) which of them count; None: all.
    """
    if _sizes_may_vary(numbers):
        return torch.bincount(numbers if chosen is None else numbers[chosen], minlength=length).double()
    ones = numbers.new_ones(len(numbers), dtype=torch.float64) if chosen is None else chosen.double()
    return numbers.new_zeros(length, dtype=torch.float64).index_add_(0, numbers, ones)  # exact in any order


def _counts(classes: int) -> int:
    return classes * (classes + 1) if classes <= MOST_CLASSES else 3 * classes


def _worst(rows: torch.Tensor) -> torch.Tensor:
    """The rows of the greatest losses, of equal ones the lowest numbers first: the same however samples were shared
    out."""
    by_number = rows[rows[:, 1].argsort(stable=True)]
    return by_number[by_number[:, 0].argsort(descending=True, stable=True)][:WORST]
