"""Random numbers for augmentation, which follow from (seed, epoch, sample) alone; drawn for a whole batch at once."""

from __future__ import annotations

import numpy as np

from trainer.hashing import mixed

Draw = tuple[int, int]
"""(seed, epoch)."""

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(draw: Draw, samples: np.ndarray, count: int) -> np.ndarray:
    """Draw random numbers in [0, 1), float64 (N, count), from (seed, epoch) and each sample's address (splitmix64).

    Args:
        samples: (N,) addresses of samples; one that is repeated in an epoch has another address each time.
    """
    seed, epoch = draw
    start = mixed(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64) + GOLDEN)
    start = mixed(start ^ (np.array([epoch], np.uint64) * GOLDEN))
    rows = mixed(start ^ (samples.astype(np.uint64) * GOLDEN))
    cells = mixed(rows[:, None] + GOLDEN * np.arange(1, count + 1, dtype=np.uint64)[None, :])
    numbers: np.ndarray = (cells >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers
