"""A model whose parameters are at servers: dense ones as one vector per server, sparse tables as rows on demand.

The model's code does not change. Each sparse table's module keeps its place; only its ``forward`` looks rows up here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trainer.host.transfers import on_its_way
from trainer.models.embedding_tables import RowEmbedding
from trainer.optim.groups import Rate, grouped
from trainer.strategies.pserver.protocol.layout import TableSpec
from trainer.strategies.pserver.protocol.sharding import (
    Piece,
    SplitMethod,
    bucket_key,
    buckets_of,
    place,
    server_of_bucket,
)
from trainer.strategies.pserver.tables.row_arrays import summed
from trainer.weights.fresh_rows import RowInit


class DenseMap:
    """Maps each server's part of the dense vector to places in the model's parameters.

    Args:
        parameters: (name, parameter), in the model's order.
        servers: how many share them.
        split_method, slice_above: see ``sharding.place``.
        rates: of parameters by name; in a server's part those of one rate lie together.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        servers: int,
        split_method: SplitMethod,
        slice_above: int | None,
        rates: Mapping[str, Rate] | None = None,
    ) -> None:
        self.parameters, self.rates = dict(parameters), rates or {}
        pieces = place([(n, p.numel()) for n, p in parameters], servers, split_method, slice_above)
        groups = grouped(((p.name, p) for p in pieces), self.rates)
        self.pieces: list[list[Piece]] = [[p for _, g in groups for p in g if p.server == s] for s in range(servers)]
        self.on_gpu = any(p.device.type == "cuda" for _, p in parameters)
        self.lengths = [[p.stop - p.start for p in own] for own in self.pieces]
        self.groups: list[list[tuple[int, Rate]]] = [
            [(sum(p.stop - p.start for p in g if p.server == s), rate) for rate, g in groups] for s in range(servers)
        ]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the dense parameters."""
        return next(iter(self.parameters.values())).dtype if self.parameters else torch.float32

    def size(self, server: int) -> int:
        """The number of elements that a server keeps."""
        return sum(self.lengths[server])

    def values(self, server: int) -> torch.Tensor:
        """Return a copy of a server's part (n,) of the parameters, on the CPU."""
        return self._gathered(server, lambda p: p.detach())

    def gradients(self, server: int, factor: float = 1.0, room: torch.Tensor | None = None) -> torch.Tensor:
        """Copy a server's part (n,) of the gradients times a factor into ``room``; zeros where there are none."""
        return self._gathered(server, lambda p: p.grad, factor, room)

    @property
    def places(self) -> list[list[tuple[str, int, int]]]:
        """For each server, its pieces in the order of its vector: (name, start, stop)."""
        return [[(p.name, p.start, p.stop) for p in own] for own in self.pieces]

    def rearranged(
        self, places: Sequence[Sequence[tuple[str, int, int]]], vectors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Servers' vectors (n,) in this map's order, from vectors of the same parameters whose pieces lay otherwise.

        Args:
            places: see :attr:`places`, of the vectors.
        """
        whole = {name: torch.zeros(p.numel(), dtype=self.dtype) for name, p in self.parameters.items()}
        for own, vector in zip(places, vectors, strict=True):
            for (name, start, stop), part in zip(own, vector.split([b - a for _, a, b in own]), strict=True):
                whole[name][start:stop] = part
        return [
            torch.cat([vector.new_empty(0), *(whole[name][start:stop] for name, start, stop in own)])
            for own, vector in zip(self.places, vectors, strict=True)
        ]

    def _gathered(
        self,
        server: int,
        what: Callable[[nn.Parameter], torch.Tensor | None],
        factor: float = 1.0,
        room: torch.Tensor | None = None,
    ) -> torch.Tensor:
        vector = torch.empty(self.size(server), dtype=self.dtype) if room is None else room
        if self.on_gpu:
            return vector.copy_(self._on_gpu(server, what, factor))  # the one wait for the GPU
        for piece, part in zip(self.pieces[server], vector.split_with_sizes(self.lengths[server]), strict=True):
            values = what(self.parameters[piece.name])
            if values is None:
                part.zero_()
                continue
            if values.shape != part.shape:
                values = values.reshape(-1)[piece.start : piece.stop]
            part.copy_(values)
            if factor != 1.0:
                part.mul_(factor)  # each part while it is in the processor's cache
        return vector

    def _on_gpu(self, server: int, what: Callable[[nn.Parameter], torch.Tensor | None], factor: float) -> torch.Tensor:
        """The same on the GPU, in one piece."""
        parts = []
        for piece in self.pieces[server]:
            parameter = self.parameters[piece.name]
            values = what(parameter)
            values = torch.zeros_like(parameter) if values is None else values
            parts.append(values.reshape(-1)[piece.start : piece.stop])
        vector = torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype)
        return vector if factor == 1.0 else vector.mul_(factor)

    def write(self, server: int, vector: torch.Tensor, add: bool = False) -> None:
        """Write a server's part (n,) into the model's parameters, or add it to them. A GPU gets it in one piece."""
        targets: list[torch.Tensor] = []
        parts: list[torch.Tensor] = []
        if self.on_gpu:
            vector = on_its_way(vector, next(iter(self.parameters.values())).device)
        for piece, part in zip(self.pieces[server], vector.split_with_sizes(self.lengths[server]), strict=True):
            parameter = self.parameters[piece.name].detach()  # its memory, without a graph
            if len(part) == parameter.numel():
                whole = part if part.shape == parameter.shape else part.view(parameter.shape)
                if self.on_gpu:
                    targets.append(parameter)
                    parts.append(whole)
                else:
                    parameter.add_(whole) if add else parameter.copy_(whole)
                continue
            flat = parameter.view(-1) if parameter.is_contiguous() else parameter.reshape(-1)
            target = flat[piece.start : piece.stop]
            target.add_(part.to(target.device)) if add else target.copy_(part)
            if flat.data_ptr() != parameter.data_ptr():
                parameter.copy_(flat.view(parameter.shape))
        if targets:
            torch._foreach_add_(targets, parts) if add else torch._foreach_copy_(targets, parts)


@dataclass
class Looked:
    """A forward's look-up in a table: its unique ids, ascending (U,), and their rows (U, D) as a leaf of the graph."""

    ids: np.ndarray
    rows: torch.Tensor


LookUp = Callable[["RemoteTable", torch.Tensor], tuple[np.ndarray, torch.Tensor, torch.Tensor]]
"""(table, ids of any shape) -> unique ids (U,), positions in them of the ids' shape, rows (U, D)."""


class RemoteTable:
    """A sparse table of the model, whose rows a worker pulls from the servers on demand.

    Args:
        number: on the wire. name, module: in the model.
        servers: how many keep its rows.
        look_up: how a forward gets rows.
        lr: factor on the learning rate.
    """

    def __init__(self, number: int, name: str, module: Any, servers: int, look_up: LookUp, lr: float = 1.0) -> None:
        self.number, self.name, self.module, self.look_up, self.lr = number, name, module, look_up, lr
        self.dim: int = module.embedding_dim
        self.rows: int | None = None if getattr(module, "unbounded", False) else module.num_embeddings
        self.init: RowInit | None = module.row_init if isinstance(module, RowEmbedding) else None
        self.key = bucket_key(name)
        self.home = server_of_bucket(servers)
        self.servers = servers
        self.start = None if self.init is not None else module.weight.detach().clone().cpu()
        self.dtype = module.weight.dtype
        self.used: list[Looked] = []
        self.detach()
        module.forward = torch.compiler.disable(self.forward)  # a compiled model stops here, and goes on with the rows

    def detach(self) -> None:
        """Replace the table's weight in its module by one without rows: the servers keep those."""
        self.module.weight = nn.Parameter(torch.empty((0, self.dim), dtype=self.dtype))

    @property
    def spec(self) -> TableSpec:
        """The :class:`TableSpec` that describes this table to servers."""
        init = self.init or RowInit("zeros")
        return TableSpec(self.number, self.name, self.dim, self.rows, init.kind, init.scale, self.lr)

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the module's forward on rows pulled for these ids; called in place of the module's own."""
        ids, positions, rows = self.look_up(self, input)
        if torch.is_grad_enabled() and self.module.training:
            rows.requires_grad_()
            self.used.append(Looked(ids, rows))
        padding = self.module.padding_idx
        if padding is not None:
            place = int(np.searchsorted(ids, padding))
            padding = place if place < len(ids) and ids[place] == padding else None
        if isinstance(self.module, nn.Embedding):
            return F.embedding(positions, rows, padding)
        offsets, weights = (*args, *[None] * (2 - len(args)))[:2]
        return F.embedding_bag(
            positions,
            rows,
            kwargs.get("offsets", offsets),
            mode=self.module.mode,
            per_sample_weights=kwargs.get("per_sample_weights", weights),
            include_last_offset=self.module.include_last_offset,
            padding_idx=padding,
        )

    def split(self, ids: np.ndarray) -> list[np.ndarray]:
        """For each server, the positions of its own ids among these (U,)."""
        if self.servers == 1:
            return [np.arange(len(ids))]
        homes = self.home[buckets_of(self.key, ids)]
        return [(homes == server).nonzero()[0] for server in range(self.servers)]

    def gradient(self) -> tuple[np.ndarray, torch.Tensor]:
        """Take the table's gradient since the last call: unique ids (U,), and gradients (U, D) summed over look-ups."""
        used = [(u.ids, u.rows.grad) for u in self.used if u.rows.grad is not None]
        self.used = []
        if not used:
            return np.empty(0, dtype=np.int64), torch.empty((0, self.dim), dtype=self.dtype)
        if len(used) == 1:
            return used[0][0], used[0][1].cpu()
        return summed([(ids, g.cpu()) for ids, g in used])
