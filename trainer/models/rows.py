"""Embedding tables whose rows follow from (seed, table, row id): the same rows on any number of servers, or on none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.hashing import hash_of, mixed

INITS = ("uniform", "normal", "zeros")
CHUNK = 1 << 18


@dataclass(frozen=True)
class RowInit:
    """How a fresh row of a table is drawn: ``uniform`` in [-scale, scale), ``normal`` with that deviation, or
    ``zeros``."""

    kind: str = "uniform"
    scale: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in INITS:
            raise ValueError(f"init must be one of {', '.join(INITS)}, not {self.kind}")


def table_key(seed: int, table: str) -> np.uint64:
    """The key of 64 bits that a table's random rows follow from, the same in every process and on every machine."""
    return np.uint64(hash_of(f"{seed}/{table}"))


def uniforms(key: np.uint64, ids: np.ndarray, columns: int) -> np.ndarray:
    """Random numbers (N, columns) float64 in [0, 1) that follow from a key and row ids (N,) of 0..2^63-1."""
    rows = mixed(ids.astype(np.uint64) + key)
    steps = (np.arange(columns, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed(rows[:, None] + steps[None, :]) >> np.uint64(11)) * 2.0**-53


def draw_rows(key: np.uint64, ids: np.ndarray, dim: int, init: RowInit) -> np.ndarray:
    """The fresh rows (N, dim) float64 of these ids (N,), whatever their order and company."""
    if init.kind == "zeros":
        return np.zeros((len(ids), dim))
    if init.kind == "uniform":
        return (uniforms(key, ids, dim) * 2.0 - 1.0) * init.scale
    u = uniforms(key, ids, 2 * dim)
    radius = np.sqrt(-2.0 * np.log1p(-u[:, :dim]))  # Box & Muller (1958)
    return radius * np.cos(2.0 * np.pi * u[:, dim:]) * init.scale


class RowEmbedding(nn.Embedding):
    """A sparse ``nn.Embedding`` without memory until :func:`materialise` draws its rows, or a server keeps them.

    Args:
        num_embeddings: rows; None: any id of 0..2^63-1, for parameter servers alone.
        embedding_dim: columns.
        init, scale: see :class:`RowInit`.
    """

    def __init__(
        self, num_embeddings: int | None, embedding_dim: int, init: str = "uniform", scale: float = 0.1
    ) -> None:
        weight = nn.Parameter(torch.empty((num_embeddings or 1, embedding_dim), device="meta"))
        super().__init__(num_embeddings or 1, embedding_dim, sparse=True, _weight=weight)
        self.unbounded = num_embeddings is None
        self.row_init = RowInit(init, scale)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> RowEmbedding:
        """``to()`` and its like: what has no memory cannot be moved, but takes the type."""
        if self.weight.is_meta:
            kind = fn(torch.empty((0,), dtype=self.weight.dtype)).dtype
            self.weight = nn.Parameter(torch.empty(self.weight.shape, dtype=kind, device="meta"))
            return self
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def tables(model: nn.Module) -> Iterator[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
    """The model's sparse tables: trainable ``nn.Embedding`` and ``nn.EmbeddingBag`` with ``sparse=True``, by name."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            yield name, module


def materialise(model: nn.Module, seed: int, device: torch.device | str = "cpu") -> None:
    """Give every RowEmbedding of the model its rows, for strategies whose workers hold whole tables."""
    for name, module in tables(model):
        if isinstance(module, RowEmbedding) and module.weight.is_meta:
            weight = torch.empty(module.weight.shape, dtype=module.weight.dtype)
            key = table_key(seed, name)
            for start in range(0, len(weight), CHUNK):
                ids = np.arange(start, min(start + CHUNK, len(weight)))
                weight[start : start + CHUNK] = torch.from_numpy(draw_rows(key, ids, weight.shape[1], module.row_init))
            module.weight = nn.Parameter(weight.to(device))


def dense_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The trainable parameters that are no sparse table."""
    rows = {id(module.weight) for _, module in tables(model)}
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad and id(p) not in rows]
