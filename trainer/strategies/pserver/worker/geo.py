"""The worker of strategy=pserver_geo: trains locally, and every k_steps exchanges differences with the servers."""

# An exchange: none -> under way -> folded. `begin_exchange` pushes the differences since the last one; `fold` takes the
# servers' answers in, when all are there. Steps go on meanwhile, and one exchange is under way at a time.
#
# What must always hold, for each value:
# - base: the servers' value, as this worker knows it. local: the value that it computes with.
# - A push carries (local - base) / workers. When it is answered, local moves by what the servers have gained beyond
#   this worker's share, so local - base is what is not pushed yet.
# - A row is pulled once and then kept; the answer to an exchange has the rows that others changed since `cursors`.
# - Rows that were asked for are inserted before an answer is folded, which may be newer (`take_in`).

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer.config.schema import PserverGeoStrategy
from trainer.host.transfers import on_its_way
from trainer.optim.sparse import DenseAndSparse
from trainer.strategies.contract import MakeUpdater
from trainer.strategies.pserver.protocol.compression import decode
from trainer.strategies.pserver.protocol.messages import Kind, Message
from trainer.strategies.pserver.tables.kernels import kernel
from trainer.strategies.pserver.tables.row_arrays import unique
from trainer.strategies.pserver.worker.ahead import wanted
from trainer.strategies.pserver.worker.clipping import clip_factor, clip_values
from trainer.strategies.pserver.worker.common_start import CommonStart
from trainer.strategies.pserver.worker.held_blocks import PushedBatches
from trainer.strategies.pserver.worker.own_share import Places
from trainer.strategies.pserver.worker.push import WholePush
from trainer.strategies.pserver.worker.remote_model import RemoteTable
from trainer.strategies.pserver.worker.replica import Replica
from trainer.strategies.pserver.worker.requests import Request


@dataclass
class Exchange:
    """A worker's differences that are being exchanged: dense ones per server, and rows per table."""

    requests: list[Request]
    moved: list[torch.Tensor]
    shares: list[torch.Tensor]
    rows: dict[int, tuple[np.ndarray, torch.Tensor, torch.Tensor]]
    batches: PushedBatches


class PserverGeo(CommonStart):
    """A worker of strategy=pserver_geo, with its own replica of the parameters and its own optimizer.

    A difference is (local - base) / workers, where base is the servers' value that this worker knows of; the local
    value then moves by what the servers gained beyond it. An exchange is under way while steps go on; the next one
    begins when it is back. Rows are pulled when they are new here and refreshed when others have changed them.
    """

    Options = PserverGeoStrategy
    options: PserverGeoStrategy

    holds_rows = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.replicas: dict[int, Replica] = {}
        self.exchange: Exchange | None = None
        self.cursors = [0] * self.seat.others.servers
        self.since = self.samples = 0
        self.missing: dict[int, np.ndarray] = {}
        self.base: list[torch.Tensor] = []

    @property
    def wire(self) -> str:
        return "full"

    def make_updater(self, make_updater: MakeUpdater) -> None:
        """Make the whole optimizer in this worker; its rule for tables decides which kernel the replicas get."""
        self.updater = make_updater(self.model)
        self.norm, self.updater.clip_norm = self.updater.clip_norm, None
        self.limit, self.updater.clip_value = self.updater.clip_value, None
        if not self.remote:
            return
        optimizer = self.updater.optimizer
        assert isinstance(optimizer, DenseAndSparse)
        rule = optimizer.rule
        self.sparse_lrs = {table.number: rule.rate(table.lr) for table in self.remote}
        for table in self.remote:
            kept = kernel(rule.name, **rule.numbers)
            self.replicas[table.number] = Replica(table.dim, self.dtype, kept, table.rows)

    def take_all(self) -> None:
        super().take_all()
        self.base = [self.dense.values(s) for s in self.client.servers]
        self.cursors = self.pulls.versions.copy()

    # --- rows ------------------------------------------------------------------------------------------------------

    def prepare(self, batch: Any) -> None:
        self.note(batch)
        self.begin()
        if self.ahead.fetched is not None:
            self.take_in()
            ids, self.ahead.fetched = self.ahead.fetched[0], None
            self.ahead.keep(ids, {n: self.replicas[n].look_up(once) for n, (_, once, _) in ids.items()})
        if coming := self.ahead.coming():
            missing = {n: self.replicas[n].missing(once) for n, once in wanted(coming).items()}
            self.missing = {n: ids for n, ids in missing.items() if len(ids)}
            self.ahead.fetched = coming, self.pulls.fetch(self.missing, dense=False, clock=0)

    def take_in(self) -> None:
        """Insert the requested rows into the replica; before folding in others' changes, which may be newer."""
        if self.ahead.fetched is None:
            return
        rows = self.pulls.receive(self.ahead.fetched[1])
        missing, self.missing = self.missing, {}
        for number, ids in missing.items():
            self.insert(number, ids, rows[number])

    def insert(self, number: int, ids: np.ndarray, values: torch.Tensor) -> None:
        """Insert rows that are new to the replica; a row that is already there stays as it is."""
        new = self.replicas[number].index.find(ids) < 0
        self.replicas[number].insert(ids[new], values[torch.from_numpy(new)])

    def look_up(self, table: RemoteTable, ids: torch.Tensor) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
        if torch.is_grad_enabled() and table.module.training:
            return super().look_up(table, ids)
        once, positions = unique(ids)
        return once, positions, on_its_way(super().rows_now(table, once, training=False), ids.device)

    def rows_now(self, table: RemoteTable, ids: np.ndarray, training: bool) -> torch.Tensor:
        if not training:
            return super().rows_now(table, ids, training)
        replica = self.replicas[table.number]
        missing = replica.missing(ids)
        if len(missing):
            self.insert(table.number, missing, super().rows_now(table, missing, training))
        return replica.look_up(ids)

    # --- steps -----------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor) -> None:
        self.updater.backward(loss)

    def step(self, samples: int) -> None:
        rows = {t.number: t.gradient() for t in self.remote}
        parameters = self.dense.parameters.values()
        clip_values(parameters, rows, self.limit)
        factor = clip_factor(parameters, rows, self.norm)
        if factor != 1.0:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        lr_factor = self.updater.factor(self.updater.steps)
        self.updater.step()
        for number, (ids, gradients) in rows.items():
            gradients = gradients * factor if factor != 1.0 else gradients
            self.replicas[number].update(ids, gradients, self.sparse_lrs[number] * lr_factor)
        self.steps += 1
        self.since += 1
        self.samples += samples
        self.client.take()
        if self.exchange is not None and all(r.answer is not None for r in self.exchange.requests):
            self.fold()
        if self.work.must_push:
            self.finish_pushes()
        elif self.since >= self.options.k_steps and self.exchange is None:
            self.begin_exchange()
            if not self.options.overlap:
                self.finish_exchange()

    def begin_exchange(self) -> None:
        """Push the differences since the last exchange to the servers."""
        share = 1.0 / self.seat.size
        self.since, self.work.must_push = 0, False
        moved = [self.dense.values(s).sub_(self.base[s]) for s in self.client.servers]
        shares = [m * share for m in moved]
        rows = {n: replica.differences(share) for n, replica in self.replicas.items()}
        batches = self.work.take_computed()
        pushed = {n: r[:2] for n, r in rows.items()}
        push = WholePush(shares, pushed, self.samples, self.updater.steps, self.age(), self.cursors, batches.records)
        self.samples = 0
        requests = self.client.push(self.encoder.messages(push))
        self.exchange = Exchange(requests, moved, shares, rows, batches)

    def fold(self, settle: bool = False) -> None:
        """Finish an exchange: move the replica by what the servers gained beyond this worker's own share."""
        self.take_in()
        exchange, self.exchange = self.exchange, None
        assert exchange is not None
        news: dict[int, list[tuple[np.ndarray, torch.Tensor]]] = {n: [] for n in self.replicas}
        for server, request in enumerate(exchange.requests):
            assert request.answer is not None
            self._fold_dense(server, exchange.moved[server], request.answer, settle)
            for number, found in news.items():
                ids = request.answer.first(Kind.IDS, number)
                if ids is not None and len(ids):
                    found.append((ids, decode(request.answer.need(Kind.ROWS, number), None, self.dtype)))
            self.cursors[server] = request.answer.clock
        for number, replica in self.replicas.items():
            parts = news[number]
            ids = np.concatenate([i for i, _ in parts]) if parts else np.empty(0, dtype=np.int64)
            values = torch.cat([v for _, v in parts]) if parts else torch.empty((0, replica.dim), dtype=self.dtype)
            replica.fold(exchange.rows[number], ids, values, settle)
        self.work.acknowledged(exchange.batches)

    def _fold_dense(self, server: int, moved: torch.Tensor, answer: Message, settle: bool) -> None:
        array = answer.first(Kind.DENSE)
        if array is None:
            return
        now = decode(array, None, self.dtype)
        if settle:
            self.dense.write(server, now)
        else:
            self.dense.write(server, now - self.base[server] - moved, add=True)
        self.base[server] = now.clone()

    def finish_exchange(self, settle: bool = False) -> None:
        """Wait for the current exchange, if there is one, and fold it in."""
        if self.exchange is not None:
            self.client.wait(self.exchange.requests)
            self.fold(settle)

    def finish_pushes(self) -> None:
        self.finish_exchange()
        self.begin_exchange()
        self.finish_exchange()

    def synchronize(self) -> None:
        """Exchange, wait for the other workers, and take the servers' values."""
        self.finish_exchange()
        self.begin_exchange()
        self.finish_exchange(settle=True)
        self.meet()
        self.begin_exchange()
        self.finish_exchange(settle=True)
        self._agree_on(list(self.model.buffers()))

    def drain(self) -> None:
        self.finish_exchange()

    def state(self) -> dict[str, Any]:
        replicas = {number: replica.state() for number, replica in self.replicas.items()}
        return {
            "base": self.base,
            "cursors": self.cursors,
            "since": self.since,
            "samples": self.samples,
            "replicas": replicas,
        }

    def in_order(self, places: Places, mode: Mapping[str, Any]) -> Mapping[str, Any]:
        base = mode.get("base")
        return {**mode, "base": self.dense.rearranged(places, base)} if places and base else mode

    def go_on(  # type: ignore[override]
        self,
        base: Sequence[torch.Tensor],
        cursors: Sequence[int],
        since: int,
        replicas: Mapping[int, Any],
        samples: int = 0,
    ) -> None:
        """Restore what :meth:`state` returned.

        Args:
            samples: behind what was not pushed yet.
        """
        super().go_on()
        self.ahead.received = None  # the replicas have it
        self.base, self.cursors, self.since, self.samples = list(base), list(cursors), since, samples
        for number, replica in self.replicas.items():
            replica.load(**replicas[number])

    def begin_anew(self, workers: int) -> None:
        super().begin_anew(workers)
        # what the other worker has computed and not pushed, it pushes itself, or others compute it again
        self.take_all()
        self.updater.steps = self.updater.steps * workers // self.seat.size

    @property
    def lr(self) -> float:
        return self.updater.lr

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        self.updater.observe(step, metrics)
