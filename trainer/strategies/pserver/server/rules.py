"""What a push does to a server's parameters and when a pull may be answered: one rule for each mode."""

# What a rule remembers of workers, besides their pushes:
#   sync   `waiting`: pushes of the step that is not complete. All present workers -> `combined` -> applied, at once or,
#          with clip_norm, by the first COMMIT.
#   async  `backups`: the parameters that each worker pulled last, for delay compensation.
#   ssp    `clocks`: steps of each worker: 0 -> 1 -> ..., or NEVER while it rests (RESTS, until WAKES or RESUMES).
#   geo    nothing; the tables know which rows each worker holds.
# Who moves it: `pushes.py` calls `push`, `duplicate` or `signal` once for each push that is new; `liveness.py` calls
# `changed` and `forget` when workers come, leave or are lost.
#
# What must always hold:
# - `push` is called once for each push, after its watermark is set. Nothing in it may wait or fail.
# - sync: a step is the mean of the pushes of all present workers, and of lost ones whose push had come, each once.
# - ssp: nobody gets parameters for a step that is more than `staleness` ahead of the slowest worker that takes steps. A
#   push that has overtaken another one does not count before the other one is there.

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from trainer.checkpoint.streamed import Streamed, of
from trainer.config.schema import PserverSspStrategy, PserverStrategy, StaleStrategy
from trainer.strategies.pserver.protocol.compression import encode
from trainer.strategies.pserver.protocol.messages import (
    CREATES,
    HOLDS,
    RESTS,
    RESUMES,
    WAKES,
    WANTS_DENSE,
    Kind,
    Message,
    Record,
    Verb,
)
from trainer.strategies.pserver.server.answers import NotYet
from trainer.strategies.pserver.server.members import Members
from trainer.strategies.pserver.server.shard import Rows, Shard
from trainer.strategies.pserver.tables.row_arrays import summed

NEVER = 1 << 62
BACKUPS = 8
"""Pulled parameters that delay compensation remembers per worker."""


@dataclass(kw_only=True)
class Push:
    """A push, decoded and checked, as a rule takes it.

    Attributes:
        rank: the worker. sequence: of the push. samples: behind its gradients; denominator: of their loss (None: the
        samples). dense: (n,) or None; rows: by table. basis: version of the parameters that the gradients were computed
        with. clock: the worker's steps, this one included. age: the server's, which rows are stamped with. merged:
        gradients that are added up in it.
    """

    rank: int
    sequence: int
    samples: float
    dense: torch.Tensor | None
    rows: Rows
    basis: int
    clock: int
    age: int
    merged: int = 1
    denominator: float | None = None


class Rule:
    """The server's rule that all modes share; each mode overrides some of it.

    Args:
        shard: the server's parameters.
        members: who takes part.
        strategy: its keys.

    Attributes:
        lockstep: a step needs all workers.
        push_flags, pull_flags: those that mean something in this mode; others are refused.
    """

    lockstep = False
    push_flags = 0
    pull_flags = WANTS_DENSE | CREATES

    def __init__(self, shard: Shard, members: Members, strategy: PserverStrategy) -> None:
        self.shard, self.members, self.strategy = shard, members, strategy
        self.staleness: Counter[int] = Counter()

    def push(self, push: Push) -> None:
        """Take a push, exactly once."""
        raise NotImplementedError

    def duplicate(self, push: Push) -> None:
        """Take a push of work that another worker has pushed already: its values are ignored."""

    def signal(self, message: Message) -> None:
        """Take a push without values, which says something by its flags."""

    def answer(self, message: Message, applied: bool) -> Message:
        """The answer to a push; ``applied``: its values have been taken just now.

        Raises:
            NotYet: what it needs is not known yet.
        """
        return Message(Verb.DONE, clock=self.shard.version)

    def may_pull(self, clock: int) -> bool:
        """Whether this rule lets the parameters that a pull asks for be pulled now."""
        return True

    def awaited(self, clock: int) -> list[int]:
        """The workers that a waiting pull waits for."""
        return []

    def pulled(self, rank: int, dense: torch.Tensor | None, rows: Rows) -> None:
        """Note that a worker got the parameters of the present version."""

    def changed(self) -> None:
        """Note that a worker came, left or was lost."""

    def forget(self, rank: int) -> None:
        """Forget a worker's former life: a new one begins and holds nothing."""

    def rests_until_it_wakes(self, rank: int) -> None:
        """Note that a worker takes part from now on, and takes no steps before it sends WAKES or RESUMES."""

    def commit(self, clock: int, norm: float) -> None:
        """Take the step, now that the norm of the whole gradient is known (two-phase clipping)."""

    def state(self) -> dict[str, Streamed]:
        """What the rule keeps about workers, all of which stand still."""
        return {}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a :meth:`state` of the same server and of as many workers."""


class Sync(Rule):
    """The server's rule for pserver_sync: the mean of all workers' gradients, weighted by denominators, is applied
    once; then everybody pulls."""

    lockstep = True

    def __init__(self, shard: Shard, members: Members, strategy: PserverStrategy) -> None:
        super().__init__(shard, members, strategy)
        self.waiting: dict[int, Push] = {}
        self.combined: tuple[torch.Tensor | None, Rows, int] | None = None
        self.clip, self.limit = strategy.clip_norm, strategy.clip_value
        self.norms: dict[int, float] = {}

    def push(self, push: Push) -> None:
        self.waiting[push.rank] = push
        self.changed()

    def changed(self) -> None:
        if self.combined is not None or not self.waiting or self.awaited(0):
            return
        pushes = [self.waiting[rank] for rank in sorted(self.waiting)]
        self.waiting.clear()
        self.shard.samples += int(sum(p.samples for p in pushes))
        whole = sum(p.samples if p.denominator is None else p.denominator for p in pushes) or 1.0
        dense = _sum([p.dense for p in pushes if p.dense is not None])
        if dense is not None:
            dense.div_(whole)
        rows = {n: _mean([p.rows[n] for p in pushes if n in p.rows], whole) for n in self.shard.tables}
        self.combined = dense, rows, max(p.age for p in pushes)
        if self.clip is None:
            self._apply(1.0)
        else:
            parts = ([] if dense is None else [dense]) + [g for _, g in rows.values()]
            self.norms[self.shard.version] = float(sum(p.double().square().sum() for p in parts))

    def commit(self, clock: int, norm: float) -> None:
        if self.combined is not None and self.clip is not None and clock == self.shard.version:
            self._apply(min(1.0, self.clip / (norm + 1e-6)))

    def _apply(self, factor: float) -> None:
        assert self.combined is not None
        dense, rows, age = self.combined
        self.combined = None
        if self.limit is not None:
            for gradient in ([] if dense is None else [dense]) + [g for _, g in rows.values()]:
                gradient.clamp_(-self.limit, self.limit)
        if factor != 1.0:
            dense = None if dense is None else dense.mul_(factor)
            rows = {n: (ids, g.mul_(factor)) for n, (ids, g) in rows.items()}
        self.shard.apply(dense, rows, age)
        self.norms.pop(self.shard.version - 3, None)

    def answer(self, message: Message, applied: bool) -> Message:
        """The answer to a push with clipping: its part of the squared norm of the combined gradient, once all have
        pushed."""
        answer = super().answer(message, applied)
        if self.clip is not None:
            norm = self.norms.get(message.clock - 1)
            if norm is None and self.shard.version < message.clock:
                raise NotYet(self.awaited(0), "the update of the parameters")
            answer.records.append(Record(Kind.NUMBERS, np.array([norm or 0.0])))
        return answer

    def may_pull(self, clock: int) -> bool:
        return self.shard.version >= clock

    def awaited(self, clock: int) -> list[int]:
        return [rank for rank in self.members.present() if rank not in self.waiting]


def _sum(vectors: list[torch.Tensor]) -> torch.Tensor | None:
    """(n,) of several workers, added up in the order of the workers; a new vector."""
    if len(vectors) < 2:
        return vectors[0].clone() if vectors else None
    total = vectors[0] + vectors[1]
    for vector in vectors[2:]:
        total += vector
    return total


def _mean(parts: list[tuple[np.ndarray, torch.Tensor]], whole: float) -> tuple[np.ndarray, torch.Tensor]:
    """Rows of several workers: the gradients of equal ids added up in the order of the workers, divided by
    ``whole``."""
    if not parts:
        return np.empty(0, dtype=np.int64), torch.empty(0)
    ids, gradients = summed(parts)
    return ids, gradients.div_(whole)


class Async(Rule):
    """The server's rule for pserver_async: every push is applied when it comes (Hogwild-style, Niu et al., 2011;
    Downpour SGD, Dean et al., 2012).

    With ``delay_compensation`` the gradient g of parameters w_old becomes g + lambda * g * g * (w - w_old) (DC-ASGD,
    Zheng et al., 2017). With ``staleness_power`` the learning rate is divided by (1 + staleness) to that power
    (Zhang et al., 2016); staleness counts the updates between the pull and its push.
    """

    def __init__(self, shard: Shard, members: Members, strategy: StaleStrategy) -> None:
        super().__init__(shard, members, strategy)
        self.compensation = float(strategy.delay_compensation)
        self.power = float(strategy.staleness_power)
        self.backups: dict[int, deque[tuple[int, torch.Tensor | None, Rows]]] = defaultdict(
            lambda: deque(maxlen=BACKUPS)
        )

    def push(self, push: Push) -> None:
        staleness = max(0, self.shard.version - push.basis)
        self.staleness[staleness] += 1
        self.shard.samples += int(push.samples)
        if self.compensation:
            self._compensate(push)
        self.shard.apply(push.dense, push.rows, push.age, (1.0 + staleness) ** -self.power, push.merged)

    def pulled(self, rank: int, dense: torch.Tensor | None, rows: Rows) -> None:
        if self.compensation:
            self.backups[rank].append((self.shard.version, dense, rows))

    def state(self) -> dict[str, Streamed]:
        found: dict[str, Streamed] = {}
        for rank, pulled in self.backups.items():
            for place, (version, dense, rows) in enumerate(pulled):
                key = f"{rank}|{place}|{version}"
                # copied: they may lie in memory that is shared, which is not kept for a copy of this process
                found[f"{key}|0"] = of((torch.empty(0) if dense is None else dense.clone()).numpy())
                for number, (ids, values) in rows.items():
                    found |= {
                        f"{key}|{number}|ids": of(ids.copy()),
                        f"{key}|{number}|values": of(values.clone().numpy()),
                    }
        return found

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        pulled: dict[tuple[int, int, int], tuple[torch.Tensor | None, Rows]] = {}
        for name, tensor in state.items():
            if name.endswith("|0"):
                rank, place, version, _ = (int(n) for n in name.split("|"))
                pulled[rank, place, version] = (tensor if len(tensor) else None), {}
        for name, tensor in state.items():
            if name.endswith("|ids"):
                *key, number = (int(n) for n in name.removesuffix("|ids").split("|"))
                values = state[name.removesuffix("ids") + "values"]
                pulled[key[0], key[1], key[2]][1][number] = tensor.numpy(), values
        for (rank, _, version), (dense, rows) in sorted(pulled.items(), key=lambda one: one[0]):
            self.backups[rank].append((version, dense, rows))

    @torch.no_grad()
    def _compensate(self, push: Push) -> None:
        for version, dense, rows in self.backups[push.rank]:
            if version != push.basis:
                continue
            if dense is not None and push.dense is not None:
                push.dense = push.dense + self.compensation * push.dense.square() * (self.shard.vector - dense)
            for number, (ids, gradients) in push.rows.items():
                if number not in rows or not len(rows[number][0]):
                    continue
                known, values = rows[number]
                places = np.searchsorted(known, ids).clip(max=len(known) - 1)
                there = known[places] == ids
                now = self.shard.tables[number].pull(ids[there], create=False)
                moved = torch.zeros_like(gradients)
                moved[torch.from_numpy(there)] = now - values[torch.from_numpy(places[there])]
                push.rows[number] = ids, gradients + self.compensation * gradients.square() * moved


class Ssp(Async):
    """The server's rule for pserver_ssp (Ho et al., 2013): a worker with c steps done gets parameters only while the
    slowest has at least c - ``staleness``. Who rests (no work left, or at a meeting) holds nobody up.

    A worker's clock counts the pushes that have come without a gap: one that has overtaken another does not count
    before the other is there, since parameters would lack it. Work that others have pushed already counts, too.
    """

    push_flags = RESTS | WAKES | RESUMES

    def __init__(self, shard: Shard, members: Members, strategy: PserverSspStrategy) -> None:
        super().__init__(shard, members, strategy)
        self.bound = int(strategy.staleness)
        self.clocks: dict[int, int] = {m.rank: 0 for m in members.all}
        self.overtaking: dict[int, dict[int, int]] = {m.rank: {} for m in members.all}

    def push(self, push: Push) -> None:
        super().push(push)
        self._came(push)

    def duplicate(self, push: Push) -> None:
        self._came(push)

    def _came(self, push: Push) -> None:
        ahead = self.overtaking[push.rank]
        ahead[push.sequence] = push.clock
        done = self.members.all[push.rank].watermark.done
        for sequence in sorted(s for s in ahead if s <= done):
            self.clocks[push.rank] = max(ahead.pop(sequence), self.clocks[push.rank])

    def signal(self, message: Message) -> None:
        """Take RESTS (no steps until it wakes), WAKES (it goes on at the slowest's steps, at least those that it
        says) or RESUMES (exactly those)."""
        rank, clock = message.rank, message.clock
        if message.flags & RESTS:
            self.clocks[rank] = NEVER
        elif message.flags & RESUMES:
            self.clocks[rank] = clock
        else:
            others = [c for r, c in self.clocks.items() if r != rank and c != NEVER and r in self.members.present()]
            self.clocks[rank] = max([clock, *([min(others)] if others and clock else [])])

    def answer(self, message: Message, applied: bool) -> Message:
        answer = super().answer(message, applied)
        if message.flags & WAKES:
            answer.clock = self.clocks[message.rank]
        return answer

    def forget(self, rank: int) -> None:
        self.overtaking[rank].clear()

    def rests_until_it_wakes(self, rank: int) -> None:
        self.clocks[rank], self.overtaking[rank] = NEVER, {}

    def slowest(self) -> int:
        """Steps of the slowest worker that takes part."""
        return min((self.clocks[rank] for rank in self.members.present()), default=NEVER)

    def may_pull(self, clock: int) -> bool:
        return self.slowest() >= clock - self.bound

    def awaited(self, clock: int) -> list[int]:
        return [r for r in self.members.present() if self.clocks[r] < clock - self.bound]


class Geo(Rule):
    """The server's rule for pserver_geo: differences that workers push, divided by their number, are added up here."""

    pull_flags = WANTS_DENSE | CREATES | HOLDS

    def push(self, push: Push) -> None:
        self.staleness[max(0, self.shard.version - push.basis)] += 1
        self.shard.samples += int(push.samples)
        self.shard.add(push.dense, push.rows, push.rank, push.age)
        self.shard.updates = max(self.shard.updates, push.clock)

    def answer(self, message: Message, applied: bool) -> Message:
        """The answer to a push: the dense values now, and the rows that others changed since the worker's cursor.

        The cursor is the version of the last answer that the worker *has*: an answer that was lost loses no row. If the
        push was not applied now, the worker's own rows come back, too: it must not count on what it has pushed.
        """
        answer = super().answer(message, applied)
        cursor = int(message.need(Kind.NUMBERS)[0])
        if self.shard.vector.numel():
            answer.records += encode(self.shard.copy(), Kind.DENSE, 0)
        for number, table in self.shard.tables.items():
            ids, values = table.refresh(message.rank, cursor)
            own = message.first(Kind.IDS, number)
            if not applied and own is not None:
                ids = np.union1d(ids, own)
                values = table.pull(ids, create=False)
            answer.records += [Record(Kind.IDS, ids, number), *encode(values, Kind.ROWS, number)]
        return answer

    def forget(self, rank: int) -> None:
        for table in self.shard.tables.values():
            table.forget(rank)

    def state(self) -> dict[str, Streamed]:
        return {f"{number}|{k}": v for number, table in self.shard.tables.items() for k, v in table.copies().items()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        for number, table in self.shard.tables.items():
            own = {n.removeprefix(f"{number}|"): v for n, v in state.items() if n.startswith(f"{number}|")}
            table.load_copies(own)


RULES: dict[str, type[Rule]] = {"sync": Sync, "async": Async, "ssp": Ssp, "geo": Geo}
