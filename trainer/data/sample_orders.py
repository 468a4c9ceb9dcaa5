"""The samplers of the group ``sampler``: each is a callable that orders the samples of an epoch.

A sampler is called as ``sampler(labels, samples, seed, epoch)`` and returns the positions of the epoch's samples. It is
a pure function of its arguments: every process calls it by itself, and a resumed run calls it again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trainer.errors import UserError, why

Positions = np.ndarray
Uses = np.ndarray
"""(N,) which use of its sample each position is in this epoch: 0 for the first. Augmentation is drawn from it."""


class EachOnce:
    """sampler=each_once and sampler=sequential: each sample once, shuffled or as stored."""

    needs_labels = False

    def __init__(self, shuffle: bool = True) -> None:
        self.shuffle = shuffle

    def __call__(self, labels: Any, samples: int, seed: int, epoch: int) -> Positions:
        if self.shuffle:
            return np.random.default_rng((seed, epoch)).permutation(samples)
        return np.arange(samples)


class ClassBalanced:
    """sampler=class_balanced: an epoch of as many samples as there are, every class equally often (within one).

    A class's samples are used in turn, in a new order each time round; so a rare class's are repeated, each time with
    another augmentation, and a frequent class's take several epochs' turns.
    """

    def __call__(self, labels: Any, samples: int, seed: int, epoch: int) -> tuple[Positions, Uses]:
        if labels is None:
            why = "the training data have no labels to count (an attribute 'labels' or 'targets', (N,))"
            raise UserError("sampler=class_balanced", why, "sampler=each_once")
        labels = np.asarray(labels)
        by_class = np.argsort(labels, kind="stable")
        by_label = np.split(by_class, np.flatnonzero(np.diff(labels[by_class])) + 1)
        random = np.random.default_rng((seed, epoch))
        share, rest = divmod(samples, len(by_label))
        extra = set(random.permutation(len(by_label))[:rest].tolist())
        chosen = []
        for number, members in enumerate(by_label):
            wanted = share + (number in extra)
            rounds = [random.permutation(members) + use * samples for use in range(-(-wanted // len(members)))]
            chosen.append(np.concatenate(rounds)[:wanted] if rounds else members[:0])
        addresses = random.permutation(np.concatenate(chosen))
        return addresses % samples, addresses // samples


class RepeatedAugmentation:
    """sampler=repeated_augmentation: some samples, each several times, augmented differently (Hoffer et al., 2020).

    An epoch has as many positions as there are samples, so it sees one sample in ``repeats``; as in DeiT, a sample's
    copies come next to each other, and so to different workers.
    """

    needs_labels = False

    def __init__(self, repeats: int = 3) -> None:
        self.repeats = repeats

    def __call__(self, labels: Any, samples: int, seed: int, epoch: int) -> tuple[Positions, Uses]:
        order = np.random.default_rng((seed, epoch)).permutation(samples)[: -(-samples // self.repeats)]
        uses = np.tile(np.arange(self.repeats), len(order))
        return np.repeat(order, self.repeats)[:samples], uses[:samples]


class Weighted:
    """sampler=weighted: samples are drawn by weights, from a column of the training data or from a file.

    Args:
        column: name of the column; the training data must have a method ``column(name)`` that returns (N,) numbers.
        path: ``.npy`` file of (N,) numbers, or a text file of a number per line; of the training samples in order.
        draws: positions of an epoch; None: as many as there are samples.
        replacement: a sample may be drawn again in the same epoch.
    """

    def __init__(
        self, column: str | None = None, path: str | None = None, draws: int | None = None, replacement: bool = True
    ) -> None:
        if (column is None) == (path is None):
            why = "sampler=weighted needs the weights of the training samples"
            raise UserError(f"sampler.column={column or 'null'}", why, "sampler.column=COLUMN (or sampler.path=FILE)")
        self.name = f"sampler.column={column}" if column is not None else f"sampler.path={path}"
        self.column, self.path, self.draws, self.replacement = column, path, draws, replacement
        self.weights: np.ndarray | None = None

    def length(self, samples: int) -> int:
        return self.draws or samples

    def prepare(self, train: Any) -> None:
        """Read the weights. Called once in each process, with the training data."""
        weights = self._from_file() if self.path is not None else self._from_column(train)
        if weights.shape != (len(train),):
            rows = " x ".join(map(str, weights.shape)) or "one number"
            raise UserError(self.name, f"holds {rows} weights, and there are {len(train)} training samples")
        wrong = np.flatnonzero(~np.isfinite(weights) | (weights < 0))
        if len(wrong):
            said = f"the weight of training sample {wrong[0]} is {weights[wrong[0]]}"
            raise UserError(self.name, f"{said}; weights are numbers from 0 on")
        usable = int(np.count_nonzero(weights))
        if not usable:
            raise UserError(self.name, "all weights are 0, so that no sample can be drawn")
        if not self.replacement and self.length(len(train)) > usable:
            draws = f"an epoch draws {self.length(len(train))} samples, and {usable} have a weight above 0"
            raise UserError("sampler.replacement=false", draws, f"sampler.draws={usable} (or sampler.replacement=true)")
        self.weights = weights / weights.sum()

    def __call__(self, labels: Any, samples: int, seed: int, epoch: int) -> Positions:
        generator = np.random.default_rng((seed, epoch))
        return generator.choice(samples, self.length(samples), replace=self.replacement, p=self.weights)

    def _from_column(self, train: Any) -> np.ndarray:
        if not callable(getattr(train, "column", None)):
            why = f"the training data ({type(train).__name__}) have no columns"
            raise UserError(self.name, why, "sampler.path=FILE (or data=table)")
        return _numbers(train.column(self.column), self.name)

    def _from_file(self) -> np.ndarray:
        try:
            if str(self.path).endswith(".npy"):
                return _numbers(np.load(str(self.path), allow_pickle=False), self.name)
            return np.loadtxt(str(self.path), dtype=np.float64, ndmin=1)
        except (OSError, ValueError) as error:
            how = "a .npy file of (N,) numbers, or a text file of a number per line"
            raise UserError(self.name, f"cannot be read: {why(error)}", f"sampler.path=FILE, {how}") from error


def _numbers(found: Any, name: str) -> np.ndarray:
    try:
        return np.asarray(found).astype(np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(name, f"does not hold numbers: {why(error)}") from error
