"""Exchanges bytes between workers through a strategy's sum, the one collective that all strategies have."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

WORD = 6
"""Bytes that travel in one float64 of a sum: whole numbers below 2^53 are exact in it."""
Total = Callable[[torch.Tensor], torch.Tensor]


def exchanged(total: Total, index: int, count: int, mine: bytes) -> list[bytes]:
    """Gather bytes from all workers of a validation: returns each worker's, in order. Calls ``total`` twice.

    Args:
        total: sums a float64 vector over the workers.
        index: this worker's place.
    """
    sizes = torch.zeros(count, dtype=torch.float64)
    sizes[index] = len(mine)
    lengths = [int(size) for size in total(sizes).tolist()]
    words = -(-max(lengths) // WORD)
    padded = np.zeros(words * WORD, np.uint8)
    padded[: len(mine)] = np.frombuffer(mine, np.uint8)
    places = np.zeros((count, words), np.float64)
    places[index] = padded.reshape(words, WORD) @ (256.0 ** np.arange(WORD))
    summed = total(torch.from_numpy(places.ravel())).cpu().numpy().reshape(count, words)
    raw = np.ascontiguousarray(summed.astype("<u8")).view(np.uint8).reshape(count, words, 8)[..., :WORD]
    return [raw[worker].tobytes()[:length] for worker, length in enumerate(lengths)]
