"""Embedding tables whose rows are drawn from (seed, table, row id), or are kept at parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class RowEmbedding(nn.Embedding):
    """A sparse ``nn.Embedding`` that takes no memory until :func:`materialise` draws its rows or servers keep them.

    Args:
        num_embeddings: rows; None: any id from 0 to 2^63 - 1, with parameter servers only.
        embedding_dim: columns.
        init, scale: see :class:`RowInit`.
    """

    def __init__(
        self, num_embeddings: int | None, embedding_dim: int, init: str = "uniform", scale: float = 0.1
    ) -> None:
        weight = nn.Parameter(torch.empty((num_embeddings or 1, embedding_dim), device="meta"))
        super().__init__(num_embeddings or 1, embedding_dim, sparse=True, _weight=weight)
        from trainer.weights.fresh_rows import RowInit

        self.unbounded = num_embeddings is None
        self.row_init = RowInit(init, scale)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> RowEmbedding:
        """``to()`` and the like: a table on the meta device cannot be moved, and takes only the dtype."""
        if self.weight.is_meta:
            kind = fn(torch.empty((0,), dtype=self.weight.dtype)).dtype
            self.weight = nn.Parameter(torch.empty(self.weight.shape, dtype=kind, device="meta"))
            return self
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def tables(model: nn.Module) -> Iterator[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
    """The model's embedding tables with sparse gradients, by name: ``nn.Embedding`` and ``nn.EmbeddingBag``."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            yield name, module


@contextmanager
def without_empty_tables(model: nn.Module) -> Iterator[list[str]]:
    """Context manager: the model's state_dict leaves out tables that have no rows here; yields their names."""
    empty = {f"{name}.weight": (table, table.weight) for name, table in tables(model) if not len(table.weight)}
    for table, _ in empty.values():
        table.register_parameter("weight", None)
    try:
        yield list(empty)
    finally:
        for table, weight in empty.values():
            table.weight = weight


def materialise(model: nn.Module, seed: int, device: torch.device | str = "cpu") -> None:
    """Draw the rows of every RowEmbedding of a model, for strategies whose workers hold whole tables."""
    for name, module in tables(model):
        if isinstance(module, RowEmbedding) and module.weight.is_meta:
            from trainer.weights.fresh_rows import fresh_table

            weight = fresh_table(seed, name, tuple(module.weight.shape), module.row_init, module.weight.dtype)
            module.weight = nn.Parameter(weight.to(device))


def dense_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The named trainable parameters of a model that are not sparse embedding tables."""
    rows = {id(module.weight) for _, module in tables(model)}
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad and id(p) not in rows]
