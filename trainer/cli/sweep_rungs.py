"""Rungs of epochs, at which jobs wait, and from which the best go on (asynchronous successive halving).

Li et al. 2020, A System for Massively Parallel Hyperparameter Tuning (arXiv 1810.05934). A job that waits has saved a
checkpoint, and goes on from it as if it had never stopped. Of n jobs that have reached a rung, n / reduction go on.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer.cli.sweep_objective import Objective


class Rungs:
    """Which jobs have reached which rung, with which value.

    Args:
        first: epochs of the first rung; each further one has ``reduction`` times as many, below ``epochs``, the end.

    Attributes:
        waiting: the jobs that wait at their rung.
    """

    def __init__(self, objective: Objective, first: int, reduction: int, epochs: int) -> None:
        self.objective, self.reduction = objective, reduction
        self.epochs: list[int] = []
        while first < epochs:
            self.epochs.append(first)
            first *= reduction
        self.values: list[dict[int, float]] = [{} for _ in self.epochs]
        self.gone_on: list[set[int]] = [set() for _ in self.epochs]
        self.waiting: set[int] = set()

    def reaches(self, number: int, points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
        """Note the rungs that a job has reached by now; returns the epochs and values of new ones.

        Args:
            points: epochs, from 0 on, and values of the objective.
        """
        found = []
        for rung, epochs in enumerate(self.epochs):
            if number in self.values[rung] or not any(epoch >= epochs - 1 for epoch, _ in points):
                continue
            value = self.objective.best(value for epoch, value in points if epoch < epochs)
            worst = float("inf") if self.objective.is_less_better else float("-inf")
            self.values[rung][number] = worst if value is None else value
            found.append((epochs, self.values[rung][number]))
        return found

    def is_to_wait(self, number: int) -> bool:
        """Whether a job that runs is to wait at a rung that it has reached, because it is not among the best there."""
        for rung, values in enumerate(self.values):
            if number in values and number not in self.gone_on[rung]:
                if number not in self._best(rung, 0):
                    return True
                self.gone_on[rung].add(number)
        return False

    def waits(self, number: int) -> None:
        """A job has stopped at its rung."""
        self.waiting.add(number)

    def promoted(self, nobody_else: bool) -> int | None:
        """Return a job that waits and is to go on now, of the highest rung; None: there is none.

        Args:
            nobody_else: no other job comes to a rung any more: of each rung one job goes on at least.
        """
        for rung in reversed(range(len(self.epochs))):
            for number in self._best(rung, int(nobody_else)):
                if number in self.waiting and number not in self.gone_on[rung]:
                    self.waiting.discard(number)
                    for below in range(rung + 1):
                        if number in self.values[below]:
                            self.gone_on[below].add(number)
                    return number
        return None

    def _best(self, rung: int, least: int) -> list[int]:
        """The best jobs of a rung, as many as may go on from it."""
        values = self.values[rung]
        order = sorted(values, key=lambda n: (values[n] if self.objective.is_less_better else -values[n], n))
        return order[: max(len(values) // self.reduction, min(least, len(values)))]
