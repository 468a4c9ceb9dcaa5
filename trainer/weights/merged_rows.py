"""Merges the rows of a table from a full part of a checkpoint and an increment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

AT_ONCE = 1 << 18
"""Rows that are copied at once."""


@dataclass(frozen=True)
class MergedRows:
    """The rows of a full part and of an increment that make a table, and their places in the table.

    Attributes:
        ids: (N,) of the table, ascending. kept: (K,) places of rows of the full part, and kept_at: where they go.
            changed_at: (M,) where the increment's rows go.
    """

    ids: np.ndarray
    kept: np.ndarray
    kept_at: np.ndarray
    changed_at: np.ndarray

    @staticmethod
    def of(full: np.ndarray, changed: np.ndarray, removed: np.ndarray) -> MergedRows:
        """Find the places from ids: of the full part and of changed rows, both ascending, and of removed rows in any
        order."""
        kept = np.flatnonzero(~np.isin(full, np.union1d(changed, removed), assume_unique=True))
        ids = np.sort(np.concatenate([full[kept], changed]))
        return MergedRows(ids, kept, np.searchsorted(ids, full[kept]), np.searchsorted(ids, changed))

    def rows(self, full: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
        """Put values together: (N, ...) of the table, from those of the full part (F, ...) and of the increment (M,
        ...)."""
        made = np.empty((len(self.ids), *changed.shape[1:]), dtype=changed.numpy().dtype)
        for first in range(0, len(self.kept), AT_ONCE):
            some = slice(first, first + AT_ONCE)
            made[self.kept_at[some]] = full.numpy()[self.kept[some]]
        made[self.changed_at] = changed.numpy()
        return torch.from_numpy(made)
