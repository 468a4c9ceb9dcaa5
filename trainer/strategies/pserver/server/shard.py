"""One server's share of the parameters: a dense vector with torch's optimizer, its rows of the tables, and the
schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.checkpoint.streamed import Streamed
from trainer.config.instantiate import call_target
from trainer.config.run_config import RunConfig
from trainer.config.schema.strategy import Entry
from trainer.optim.groups import Rate, optimizer_of
from trainer.optim.schedules import Plateau
from trainer.optim.sparse import SparseRule, rule_of
from trainer.optim.state_loading import saved_keys, state_keys, states_to_load
from trainer.optim.state_transfer import StateKeys, plan_transfer
from trainer.optim.states import States
from trainer.strategies.pserver.protocol.layout import Layout
from trainer.strategies.pserver.protocol.sharding import bucket_key, buckets_of, server_of_bucket
from trainer.strategies.pserver.server.admission import Admission, Count, Probability
from trainer.strategies.pserver.server.server_assignment import ServersPlan
from trainer.strategies.pserver.server.sparse_table import SparseTable
from trainer.strategies.pserver.tables.kernels import kernel
from trainer.weights.fresh_rows import RowInit
from trainer.weights.server_files import BEGAN, DENSE, Piece, ServerFile, Tensors
from trainer.weights.server_files import pieces as pieces_of

SUMS = SparseRule("sgd", 0.0, {})
"""Kernel of geo tables: rows are summed, no optimizer."""
Rows = dict[int, tuple[np.ndarray, torch.Tensor]]
"""By table number: unique ids (U,) and values or gradients (U, D)."""
Saved = tuple[Tensors, Mapping[str, Any]]
"""A server's state: tensors by name, and plain numbers."""


class Shard:
    """The parameters of one server; one thread uses it.

    Args:
        config: the run's; its optimizer, scheduler and seed count here.
        entry: when an id becomes a row.
        plan: the run's; its servers, and its steps, for the schedule.
        server: which one this is.
        layout: what it keeps. room: makes the vector (n,) that is sent.
        updates_per_step: gradients that count as one step of the schedule (workers, where each is applied by itself).
        geo_workers: how many workers exchange differences; 0: the optimizer runs here.
    """

    def __init__(
        self,
        config: RunConfig,
        entry: Entry,
        plan: ServersPlan,
        server: int,
        layout: Layout,
        room: Callable[[int, torch.dtype], torch.Tensor],
        updates_per_step: int = 1,
        geo_workers: int = 0,
    ) -> None:
        self.room = room
        self.layout, self.server, self.servers = layout, server, plan.topology.roles["server"]
        self.entry = entry
        self.dtype = getattr(torch, layout.dtype)
        self.version = self.updates = self.samples = 0
        self.updates_per_step = updates_per_step
        self.vector = torch.zeros(layout.dense, dtype=self.dtype)
        self._copy: tuple[int, torch.Tensor] | None = None
        groups = layout.groups or [(layout.dense, 1.0, True)]
        self.rates = [Rate(lr, decays) for _, lr, decays in groups]
        self.parts = [nn.Parameter(part) for part in self.vector.split([n for n, _, _ in groups])]  # share its memory
        self.sizes = [part.numel() for part in self.parts]
        groups_of_one: list[tuple[Rate, list[Any]]] = [(r, [p]) for r, p in zip(self.rates, self.parts, strict=True)]
        self.optimizer = optimizer_of(config.optimizer, groups_of_one, plan.batches.lr)
        self.base_lrs = [float(g["lr"]) for g in self.optimizer.param_groups]
        self.schedule = call_target(
            config.node("scheduler"),
            "scheduler",
            total_steps=plan.length.total_steps,
            steps_per_epoch=plan.length.steps_per_epoch,
        )
        self.factor: Callable[[int], float] = self.schedule.factor
        self.home = server_of_bucket(self.servers)
        self.config, self.geo_workers = config, geo_workers
        self.sparse_lrs: dict[int, float] = {}
        self.tables = self._fresh_tables()
        self.keys = {t.number: bucket_key(t.name) for t in layout.tables}

    def _fresh_tables(self) -> dict[int, SparseTable]:
        if not self.layout.tables:
            return {}
        rule = SUMS if self.geo_workers else rule_of(self.config.optimizer, self.optimizer)
        self.sparse_lrs = {spec.number: rule.rate(spec.lr) for spec in self.layout.tables}
        admission: Admission | None = Count(self.entry.count) if self.entry.count > 1 else None
        if self.entry.probability < 1:
            admission = Probability(self.entry.probability)
        return {
            spec.number: SparseTable(
                spec.name,
                spec.dim,
                self.dtype,
                self.config.seed,
                RowInit(spec.init, spec.scale),
                kernel(rule.name, **rule.numbers),
                admission=admission,
                num_rows=spec.rows,
                workers=self.geo_workers,
            )
            for spec in self.layout.tables
        }

    def owns(self, table: int, ids: np.ndarray) -> np.ndarray:
        """Which rows of a table live in this shard: (N,) bool."""
        return self.home[buckets_of(self.keys[table], ids)] == self.server  # type: ignore[no-any-return]

    def copy(self) -> torch.Tensor:
        """The dense values (n,) of this version; all who ask get the same array, and must not change it."""
        if self._copy is None or self._copy[0] != self.version:
            self._copy = self.version, self.room(self.layout.dense, self.dtype).copy_(self.vector)
        return self._copy[1]

    def name_of(self, element: int) -> str:
        """The parameter that an element of the dense vector belongs to."""
        for name, start, stop in self.layout.pieces:
            if element < stop - start:
                return name
            element -= stop - start
        raise IndexError(element)

    @property
    def step(self) -> int:
        """Steps of the schedule that are done."""
        return self.updates // self.updates_per_step

    def apply(self, gradient: torch.Tensor | None, rows: Rows, clock: int, scale: float = 1.0, merged: int = 1) -> None:
        """Make one update: dense gradient (n,) and summed gradients of rows.

        Args:
            clock: for the age of rows.
            scale: factor on the learning rate of this update.
            merged: gradients that were added up for it, by which the schedule goes on.
        """
        factor = self.factor(self.step) * scale
        if gradient is not None and self.vector.numel():
            for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
                group["lr"] = base * factor
            for part, own in zip(self.parts, gradient.split_with_sizes(self.sizes), strict=True):
                part.grad = own
            self.optimizer.step()
            for part in self.parts:
                part.grad = None
        for number, (ids, gradients) in rows.items():
            if len(ids):
                table = self.tables[number]
                table.push(ids, gradients, self.sparse_lrs[number] * factor, self.version + 1 - table.began, clock)
        self.version += 1
        self.updates += merged

    @torch.no_grad()
    def add(self, delta: torch.Tensor | None, rows: Rows, writer: int, clock: int) -> None:
        """Add a worker's differences to this shard, for pserver_geo."""
        self.version += 1
        if delta is not None:
            self.vector += delta
        for number, (ids, deltas) in rows.items():
            self.tables[number].add(ids, deltas, writer, self.version, clock)

    def state(self, increment: bool = False) -> tuple[dict[str, Streamed], dict[str, Any]]:
        """This shard for a snapshot: tensors by name, looked up when they are written, and plain numbers; neither
        depends on how many servers there are.

        Args:
            increment: of the tables, the rows alone that have changed since the last full part.
        """
        tensors: dict[str, Streamed] = {}
        numbers: dict[str, Any] = {}
        for name, vector in self._vectors():
            if isinstance(vector, float):
                numbers[name] = vector
                continue
            offset = 0
            for parameter, start, stop in self.layout.pieces:
                cut = partial(_cut, vector, offset, offset + stop - start)
                tensors[f"{name}|{parameter}|{start}"] = Streamed((stop - start,), self.vector.numpy().dtype, cut)
                offset += stop - start
        for table in self.tables.values():
            tensors |= {f"table|{table.name}|{key}": value for key, value in table.state(increment).items()}
        scale = {"scale": self.schedule.scale} if isinstance(self.schedule, Plateau) else {}
        done = {
            "samples": self.samples,
            "version": self.version,
            "updates": self.updates,
            "updates_per_step": self.updates_per_step,
            BEGAN: {table.name: table.began for table in self.tables.values()},
        }
        return tensors, {**done, "numbers": numbers, **scale}

    def _vectors(self) -> Iterator[tuple[str, list[np.ndarray] | float]]:
        """The parameters and the optimizer's state: vectors of the same length, cut by learning rate, and numbers, one
        for each rate."""
        yield DENSE, [self.vector.numpy()]
        states = [self.optimizer.state.get(part, {}) for part in self.parts]
        for key, first in states[0].items():
            if not isinstance(first, torch.Tensor):
                continue
            if first.dim() == 1 and first.shape == self.parts[0].shape:
                yield f"{DENSE}.{key}", [state[key].numpy() for state in states]
            else:
                for rate, state in zip(self.rates, states, strict=True):
                    yield f"{DENSE}.{key}|{rate.lr:g}|{rate.decays}", float(state[key].item())

    @torch.no_grad()
    def load(self, parts: Sequence[Saved]) -> None:
        """Take what belongs to this shard from the saved states of any number of servers.

        Args:
            parts: each server's (tensors by name, numbers).

        Raises:
            ValueError: they are those of another model.
        """
        self._copy = None
        saved_by = str(parts[0][1].get("optimizer", "")).partition(" (")[0]
        live = state_keys(self.optimizer, [str(number) for number in range(len(self.parts))])
        fresh = [dict(self.optimizer.state.get(part, {})) for part in self.parts]
        self._load_vectors([tensors for tensors, _ in parts])
        for _, numbers in parts:
            self._load_numbers(numbers)
        self._fit_state(saved_by, live, fresh)
        # a lost worker's last push may have come to some servers alone
        self.samples = max(int(numbers.get("samples", 0)) for _, numbers in parts)
        self._load_tables(parts)

    def _load_vectors(self, parts: Sequence[Tensors]) -> None:
        """Load the parameters, and the optimizer's state of each element."""
        states = [self.optimizer.state[part] for part in self.parts]
        for state in states:
            state.clear()
        for kind, pieces in pieces_of(parts).items():
            vector = self._assembled(pieces)
            if kind == DENSE:
                self.vector.copy_(vector)
                continue
            for state, own in zip(states, vector.split(self.sizes), strict=True):
                state[kind.removeprefix(f"{DENSE}.")] = own.clone()

    @torch.no_grad()
    def _fit_state(self, saved_by: str, live: StateKeys, fresh: Sequence[Mapping[str, Any]]) -> None:
        """Keep of the loaded state what this optimizer takes over; what it lacks begins anew.

        Args:
            saved_by: the class of the optimizer that it is of; empty: not told.
            live: what this optimizer keeps of each part, by its number; fresh: how it begins.
        """
        parts = {str(number): part for number, part in enumerate(self.parts)}
        states: States = {name: dict(self.optimizer.state[part]) for name, part in parts.items()}
        kept = states_to_load(plan_transfer(saved_keys(saved_by or live.kind, states), live), states, parts)
        for (name, part), begun in zip(parts.items(), fresh, strict=True):
            self.optimizer.state[part] = kept.get(name) or dict(begun)

    def _load_numbers(self, saved: Mapping[str, Any]) -> None:
        """Load the position of the schedule, and the optimizer's numbers for each rate."""
        self.version = int(saved["version"])
        self.updates = int(saved["updates"]) * self.updates_per_step // int(saved["updates_per_step"])
        if isinstance(self.schedule, Plateau):
            self.schedule.scale = float(saved.get("scale", 1.0))
        for name, value in saved["numbers"].items():
            self._remember(name, float(value))

    def _load_tables(self, parts: Sequence[Saved]) -> None:
        """Load the rows that belong to this server. If the rule has changed, its steps count from now."""
        self.tables = self._fresh_tables()
        for number, table in self.tables.items():
            prefix = f"table|{table.name}|"
            for tensors, numbers in parts:
                own = {n.removeprefix(prefix): tensors[n] for n in tensors if n.startswith(prefix)}
                table.began = int(numbers.get(BEGAN, {}).get(table.name, 0))
                if isinstance(tensors, ServerFile) and tensors.tables[table.name].kernel != table.kernel.name:
                    own |= {"rows": table.with_fresh_state(own["rows"])}
                    table.began = self.version
                table.load(own, partial(self.owns, number))

    def _remember(self, name: str, value: float) -> None:
        """Set a number of the optimizer for its own rate, and for rates without a saved number."""
        key, _, of = name.removeprefix(f"{DENSE}.").partition("|")
        for rate, part in zip(self.rates, self.parts, strict=True):
            state = self.optimizer.state[part]
            if of == f"{rate.lr:g}|{rate.decays}" or key not in state:
                state[key] = torch.tensor(value, dtype=torch.float32)

    def _assembled(self, pieces: Mapping[str, list[Piece]]) -> torch.Tensor:
        """(n,) this server's vector, from pieces that were cut anywhere."""
        vector = torch.zeros(self.layout.dense, dtype=self.dtype)
        offset = 0
        for parameter, start, stop in self.layout.pieces:
            if parameter not in pieces:
                raise ValueError(f"the saved parameters have no {parameter}")
            filled = 0
            for begin, values in pieces[parameter]:
                low, high = max(start, begin), min(stop, begin + len(values))
                if low < high:
                    vector[offset + low - start : offset + high - start] = values[low - begin : high - begin]
                    filled += high - low
            if filled != stop - start:
                raise ValueError(f"the saved {parameter} has another size")
            offset += stop - start
        return vector


def _cut(arrays: Sequence[np.ndarray], start: int, stop: int) -> Iterator[np.ndarray]:
    """Elements start to stop of these arrays, one behind the other."""
    for array in arrays:
        yield array[max(0, start) : max(0, stop)]
        start, stop = start - len(array), stop - len(array)
