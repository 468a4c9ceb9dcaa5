"""Wide & Deep for click-through data: from dense features and ids of 26 slots to one logit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from trainer.models.embedding_tables import RowEmbedding


class WideAndDeep(nn.Module):
    """A linear model beside a deep network on embedded ids (Cheng et al., 2016, arXiv:1606.07792).

    All slots share one table: an id depends on slot and token. The linear part gets the dense features; the network
    gets the dense features and the ids' rows.

    Args:
        table_size: rows of the table; None: any id from 0 to 2^63 - 1, with parameter servers only.
        embedding_dim: columns of the table.
        dense_features, sparse_slots: numbers and ids of a sample.
        hidden: widths of the network's layers.
        init_scale: fresh rows are uniform in [-init_scale, init_scale).

    Raises:
        ValueError: a size below 1.
    """

    def __init__(
        self,
        table_size: int | None = 1000001,
        embedding_dim: int = 10,
        dense_features: int = 13,
        sparse_slots: int = 26,
        hidden: Sequence[int] = (400, 400, 400),
        init_scale: float = 0.01,
    ) -> None:
        super().__init__()
        if min(1 if table_size is None else table_size, embedding_dim, dense_features, sparse_slots, *hidden) < 1:
            raise ValueError("every size must be at least 1")
        self.embedding = RowEmbedding(table_size, embedding_dim, "uniform", init_scale)
        self.wide = nn.Linear(dense_features, 1)
        layers: list[nn.Module] = []
        width = dense_features + sparse_slots * embedding_dim
        for size in hidden:
            layers += [nn.Linear(width, size), nn.ReLU()]
            width = size
        self.deep = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Compute logits (N,) from ``dense`` (N, dense_features) and int64 ids ``sparse`` (N, sparse_slots)."""
        rows = self.embedding(inputs["sparse"])
        dense = inputs["dense"]
        deep = self.deep(torch.cat([dense, rows.flatten(1)], 1))
        logits: torch.Tensor = (self.wide(dense) + deep).squeeze(1)
        return logits
