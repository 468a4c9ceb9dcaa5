"""Draws the initial rows of embedding tables from (seed, table, row id), the same on any number of servers or none."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trainer.hashing import hash_of, mixed

INITS = ("uniform", "normal", "zeros")
CHUNK = 1 << 18


@dataclass(frozen=True)
class RowInit:
    """How a new row is drawn: ``uniform`` in [-scale, scale), ``normal`` with that deviation, or ``zeros``."""

    kind: str = "uniform"
    scale: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in INITS:
            raise ValueError(f"init must be one of {', '.join(INITS)}, not {self.kind}")


def table_key(seed: int, table: str) -> np.uint64:
    """The 64-bit key from which a table's random rows follow, the same in every process and on every machine."""
    return np.uint64(hash_of(f"{seed}/{table}"))


def _uniforms(key: np.uint64, ids: np.ndarray, columns: int) -> np.ndarray:
    """Random numbers (N, columns) float64 in [0, 1) that follow from a key and row ids (N,) of 0..2^63-1."""
    rows = mixed(ids.astype(np.uint64) + key)
    steps = (np.arange(columns, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed(rows[:, None] + steps[None, :]) >> np.uint64(11)) * 2.0**-53


def draw_rows(key: np.uint64, ids: np.ndarray, dim: int, init: RowInit) -> np.ndarray:
    """Draw the fresh rows (N, dim) float64 of these ids (N,); each depends on seed, table and id alone."""
    if init.kind == "zeros":
        return np.zeros((len(ids), dim))
    if init.kind == "uniform":
        return (_uniforms(key, ids, dim) * 2.0 - 1.0) * init.scale
    u = _uniforms(key, ids, 2 * dim)
    radius = np.sqrt(-2.0 * np.log1p(-u[:, :dim]))  # Box & Muller (1958)
    return radius * np.cos(2.0 * np.pi * u[:, dim:]) * init.scale


def fresh_table(seed: int, name: str, shape: tuple[int, ...], init: RowInit, dtype: torch.dtype) -> torch.Tensor:
    """Draw a fresh table (rows, columns): the initial values of all its rows."""
    weight, key = torch.empty(shape, dtype=dtype), table_key(seed, name)
    for start in range(0, len(weight), CHUNK):
        ids = np.arange(start, min(start + CHUNK, len(weight)))
        weight[start : start + CHUNK] = torch.from_numpy(draw_rows(key, ids, weight.shape[1], init))
    return weight
