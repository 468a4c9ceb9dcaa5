"""Exchanges bytes between workers through a strategy's sum, the one collective that all strategies have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from trainer.host.transfers import on_its_way

WORD = 6
"""Bytes that travel in one float64 of a sum: whole numbers below 2^53 are exact in it."""
Total = Callable[[torch.Tensor], torch.Tensor]


def summed(total: Total, parts: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Add up vectors over the workers in one collective call, on the device of the first part."""
    vectors = [*parts, *(on_its_way(vector, parts[0].device) for vector in plain)]
    return list(total(torch.cat(vectors)).split([len(vector) for vector in vectors]))


def exchanged(total: Total, index: int, count: int, own: bytes) -> list[bytes]:
    """Gather bytes from all workers of a validation: returns each worker's, in order. Calls ``total`` twice.

    Args:
        total: sums a float64 vector over the workers.
        index: this worker's place.
    """
    sizes = torch.zeros(count, dtype=torch.float64)
    sizes[index] = len(own)
    lengths = [int(size) for size in total(sizes).tolist()]
    words = -(-max(lengths) // WORD)
    padded = np.zeros(words * WORD, np.uint8)
    padded[: len(own)] = np.frombuffer(own, np.uint8)
    places = np.zeros((count, words), np.float64)
    places[index] = padded.reshape(words, WORD) @ (256.0 ** np.arange(WORD))
    summed = total(torch.from_numpy(places.ravel())).cpu().numpy().reshape(count, words)
    raw = np.ascontiguousarray(summed.astype("<u8")).view(np.uint8).reshape(count, words, 8)[..., :WORD]
    return [raw[worker].tobytes()[:length] for worker, length in enumerate(lengths)]


def gathered_rows(
    total: Total, index: int, count: int, tables: Sequence[np.ndarray], plain: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[list[np.ndarray]]]:
    """Add up vectors over the workers, and gather all rows of each table from them.

    A collective call of one sum, and of a second one where a table has rows and there are several workers.

    Args:
        total: sums a float64 vector over the workers.
        index: this worker's place among ``count``.
        tables: each (R, C) float64 without NaN, R differs between the workers.
        plain: vectors that add up.

    Returns:
        the sums of the plain vectors, and for each table the workers' rows in order.
    """
    sizes = torch.zeros(len(tables), count, dtype=torch.float64)
    sizes[:, index] = torch.tensor([len(table) for table in tables], dtype=torch.float64)
    vectors = [*plain, *([sizes.flatten()] if count > 1 else [])]
    added = list(total(torch.cat(vectors)).cpu().split([len(vector) for vector in vectors]))
    if count == 1:
        return added, [[table] for table in tables]
    lengths = added.pop().reshape(len(tables), count).long()
    most = lengths.amax(1).tolist()
    places = [np.zeros((count, rows, table.shape[1])) for rows, table in zip(most, tables, strict=True)]
    for place, table in zip(places, tables, strict=True):
        place[index, : len(table)] = table
    if any(most):
        summed = total(torch.from_numpy(np.concatenate([place.ravel() for place in places]))).cpu().numpy()
        cuts = np.cumsum([place.size for place in places])[:-1]
        places = [part.reshape(place.shape) for part, place in zip(np.split(summed, cuts), places, strict=True)]
    return added, [
        [place[worker, :rows] for worker, rows in enumerate(own)]
        for place, own in zip(places, lengths.tolist(), strict=True)
    ]
