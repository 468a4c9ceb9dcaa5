"""A teacher model that draws click rows and their labels, so that the best possible AUC is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO

import numpy as np

from trainer.data.criteo.parse import DENSE, LEAST, SLOTS, SPAN
from trainer.hashing import mixed

ZIPF = 1.3
SMALLEST, LARGEST = 4, 250
EMPTY_TOKEN, EMPTY_NUMBER = 0.04, 0.08
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11))
LATENT = 2
TOKENS, NUMBERS, CROSSES = 0.25, 0.4, 0.2
"""Strengths, as the deviation of each term's share of the logit: of a token, of a number, of a pair of tokens."""
BIAS = -1.2
MOST = 65536


@dataclass(frozen=True)
class DrawnRows:
    """Drawn click rows: ids (N, 26) from -1 (empty) up, integers (N, 13), which of them are missing, true logits.

    Attributes:
        probability: (N,) that the label is 1; labels: (N,) drawn from it.
    """

    ids: np.ndarray
    integers: np.ndarray
    missing: np.ndarray
    probability: np.ndarray
    labels: np.ndarray


class Teacher:
    """The teacher model that draws synthetic click rows.
    Its logit = bias + a weight per token + a weight per number + products of latent numbers of six pairs of slots.

    Args:
        seed: of its weights.
    """

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng([seed, 0])
        self.sizes = np.geomspace(SMALLEST, LARGEST, SLOTS).round().astype(int)
        self.tokens = [generator.normal(0, TOKENS, size) for size in self.sizes]
        self.numbers = generator.normal(0, NUMBERS, DENSE)
        self.latent = [generator.normal(0, (CROSSES / LATENT**0.5) ** 0.5, (size, LATENT)) for size in self.sizes]
        self.cumulated = [np.cumsum(1.0 / np.arange(1, n + 1) ** ZIPF) for n in self.sizes]

    def draw(self, rows: int, generator: np.random.Generator) -> DrawnRows:
        """Draw ``rows`` click rows with their labels."""
        ids = np.empty((rows, SLOTS), dtype=np.int64)
        for slot, cumulated in enumerate(self.cumulated):
            ids[:, slot] = np.searchsorted(cumulated, generator.random(rows, np.float32) * cumulated[-1])
        np.minimum(ids, self.sizes - 1, out=ids)
        ids[generator.random((rows, SLOTS), np.float32) < EMPTY_TOKEN] = -1
        shares = generator.exponential(0.5, (rows, DENSE)).clip(0, 3)
        integers = np.minimum(np.floor(shares * SPAN), MOST - 8).astype(np.int64) + LEAST.astype(np.int64)
        missing = generator.random((rows, DENSE), np.float32) < EMPTY_NUMBER
        probability = 1.0 / (1.0 + np.exp(-self.logits(ids, integers, missing)))
        return DrawnRows(ids, integers, missing, probability, (generator.random(rows) < probability).astype(np.uint8))

    def logits(self, ids: np.ndarray, integers: np.ndarray, missing: np.ndarray) -> np.ndarray:
        """The teacher's logits (N,) of click rows; an empty field adds nothing."""
        total = np.where(missing, 0.0, (integers - LEAST) / SPAN - 0.5) @ self.numbers + BIAS
        for slot in range(SLOTS):
            total += np.append(self.tokens[slot], 0.0)[ids[:, slot]]
        for one, other in PAIRS:
            left, right = (np.vstack([self.latent[s], np.zeros((1, LATENT))])[ids[:, s]] for s in (one, other))
            total += (left * right).sum(1)
        return total


def area_under_curve(scores: np.ndarray, labels: np.ndarray) -> float:
    """The area under the ROC curve of a teacher's scores (N,) without ties, by the positives' ranks (Mann & Whitney,
    1947)."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    positives = int(labels.sum())
    excess = ranks[labels == 1].sum() - positives * (positives + 1) / 2
    return float(excess / (positives * (len(labels) - positives)))


def write(file: IO[bytes], rows: DrawnRows) -> None:
    """Write rows that a :class:`Teacher` has drawn as text in Criteo's format.

    Every field has its place in a table of bytes, filled up with zeros, which are then left out.
    """
    count = len(rows.labels)
    columns = [(rows.labels + ord("0")).reshape(-1, 1)]
    tab = np.full((count, 1), ord("\t"), dtype=np.uint8)
    for feature in range(DENSE):
        text = _DECIMALS[rows.integers[:, feature] + 8]
        text[rows.missing[:, feature]] = 0
        columns += [tab, text]
    for slot in range(SLOTS):
        text = _tokens(slot)[rows.ids[:, slot]]
        columns += [tab, text]
    columns.append(np.full((count, 1), ord("\n"), dtype=np.uint8))
    table = np.concatenate(columns, axis=1).reshape(-1)
    file.write(table[table != 0].tobytes())


def _tokens(slot: int) -> np.ndarray:
    """(LARGEST + 1, 8) bytes: each id's token of eight hexadecimal digits, and last the empty one."""
    numbers = mixed(np.arange(LARGEST, dtype=np.uint64) + np.uint64(slot << 32)) >> np.uint64(32)
    nibbles = (numbers[:, None] >> np.arange(28, -4, -4, dtype=np.uint64)) & np.uint64(15)
    return np.vstack([np.frombuffer(b"0123456789abcdef", np.uint8)[nibbles.astype(int)], np.zeros((1, 8), np.uint8)])


_DECIMALS = np.array([str(n) for n in range(-8, MOST)], dtype="S6").view(np.uint8).reshape(-1, 6)
