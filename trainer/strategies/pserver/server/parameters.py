"""START, SHRINK and RATE: a server keeps nothing until the first worker has sent the start, then its share of the
parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from trainer.checkpoint.removal_guard import not_removed_meanwhile
from trainer.config.run_config import RunConfig
from trainer.optim.schedules import Plateau
from trainer.strategies.builtin import PserverDeclaration
from trainer.strategies.pserver.protocol import snapshot
from trainer.strategies.pserver.protocol.compression import decode
from trainer.strategies.pserver.protocol.layout import Layout
from trainer.strategies.pserver.protocol.messages import Kind, Malformed, Message, Verb, text
from trainer.strategies.pserver.server import checks
from trainer.strategies.pserver.server.answers import NotYet
from trainer.strategies.pserver.server.members import Members
from trainer.strategies.pserver.server.rules import RULES, Async, Rule
from trainer.strategies.pserver.server.server_assignment import ServersPlan
from trainer.strategies.pserver.server.shard import Shard
from trainer.strategies.pserver.server.worker_checkpoint import saved_by_workers
from trainer.weights.server_files import ServerFile, parts_of

RULE = "rule|"
"""Prefix of the names of the state that a server's rule keeps about workers."""
STEPS = "steps"
"""``evict_by=steps``: ages are counted in workers' steps, which a later run counts from 0 again."""


class Parameters:
    """A server's shard, the rule by which pushes change it, and the age that rows are stamped with.

    Args:
        config, plan: the run's; declared: its strategy.
        server: which one this is.
        members: the workers. room: makes the vector (n,) that is sent to them.
        resume: folder of the checkpoint that the run goes on from; empty: it begins.
    """

    def __init__(
        self,
        config: RunConfig,
        declared: PserverDeclaration,
        plan: ServersPlan,
        server: int,
        members: Members,
        room: Callable[[int, torch.dtype], torch.Tensor],
        resume: str = "",
    ) -> None:
        self.config, self.plan, self.server, self.members, self.resume = config, plan, server, members, resume
        self.strategy, self.mode = declared.options, declared.mode
        self.finite_only = declared.options.on_nonfinite == "refuse"
        self.most_merged = getattr(declared.options, "max_merge_var_num", 1)
        self.shard: Shard | None = None
        self.room = room
        self.rule: Rule | None = None
        self.ready = False
        self.age = 0
        self.age_before = 0  # of the run that these parameters come from, where workers' steps count

    @property
    def servers(self) -> int:
        """How many servers the run has."""
        return self.plan.topology.roles.get("server", 0)

    @property
    def version(self) -> int:
        """Updates that the parameters have seen."""
        return self.shard.version if self.shard is not None else 0

    @property
    def samples(self) -> int:
        """Training samples behind these updates, each push counted once, over all lives of the run."""
        return self.shard.samples if self.shard is not None else 0

    @property
    def step(self) -> int:
        """Steps of the schedule that are done."""
        return self.shard.step if self.shard is not None else 0

    def opened(self) -> tuple[Shard, Rule]:
        """The shard and the rule, once the start is complete.

        Raises:
            NotYet: the start is not complete.
        """
        if self.shard is None or self.rule is None or not self.ready:
            raise NotYet(self.members.present()[:1], "the equal start")
        return self.shard, self.rule

    # --- the start -------------------------------------------------------------------------------------------------

    def start(self, message: Message) -> Message:
        """START: take the first worker's parameters, or saved ones, as the start. Rows may follow in more messages."""
        body = message.mapping()
        if message.rank != 0:
            raise Malformed("the start is worker 0's to make")
        if self.ready:  # it was started again; the others are under way
            return Message(Verb.DONE, clock=self.version)
        last = bool(body["last"])
        if self.shard is None:
            self._begin(checks.layout(body), message)
        elif not (self.resume or self.strategy.load_from):
            rows = checks.rows(self.shard, message)
            if self.finite_only:
                checks.finite(self.shard, None, rows)
            for number, (ids, values) in rows.items():
                self.shard.tables[number].assign(ids, values)
        self.ready = last
        return Message(Verb.DONE, clock=self.version)

    def _begin(self, layout: Layout, message: Message) -> None:
        """Take over the whole start, or nothing if a part of it does not fit."""
        if layout.dtype not in ("float32", "float64"):
            raise Malformed(f"parameters of {layout.dtype}")
        array = message.need(Kind.DENSE)
        if array.shape != (layout.dense,):
            raise Malformed(f"{array.shape} dense values for {layout.dense}")
        shard = self._shard(layout)
        rule = RULES[self.mode](shard, self.members, self.strategy)
        if self.resume:
            with not_removed_meanwhile(self.resume, Path(self.plan.paths.run_dir)):
                self._go_on(shard, rule, Path(self.resume))
        elif folder := self.strategy.load_from:
            self._load(shard, Path(folder))
        else:
            values = decode(array, message.first(Kind.SCALES), shard.dtype)
            if self.finite_only:
                checks.finite(shard, values, {})
            shard.vector.copy_(values)
        self.shard, self.rule = shard, rule

    def _shard(self, layout: Layout) -> Shard:
        workers = len(self.members.all)
        per_step = workers if self.mode in ("async", "ssp") else 1
        geo = workers if self.mode == "geo" else 0
        return Shard(self.config, self.strategy.entry, self.plan, self.server, layout, self.room, per_step, geo)

    def _load(self, shard: Shard, folder: Path) -> None:
        """Load what another run has saved. The pushes of its workers do not count: this run's are counted from 1."""
        parts = snapshot.read(folder, verify=False).parts
        shard.load([(part, part.meta) for part in parts])
        shard.samples = 0
        self.age = max(int(part.meta["age"]) for part in parts)
        self.age_before = self.age if self.strategy.evict_by == STEPS else 0

    def _go_on(self, shard: Shard, rule: Rule, folder: Path) -> None:
        """Restore the servers' state at a checkpoint; with as many servers as before, each restores its own numbers."""
        parts = parts_of(folder)
        if not parts:
            shard.load([saved_by_workers(folder, shard)])
            self.age = shard.version
            return
        parts.sort(key=lambda part: part.server == self.server)
        self._be(shard, rule, parts, len(parts) == self.servers)

    def _be(self, shard: Shard, rule: Rule, parts: Sequence[ServerFile], same: bool = True) -> None:
        """Restore saved parts; ``same``: by a server that kept what this one keeps, whose part is the last.

        Of workers out of step others begin anew where these are more or fewer, and so does what a rule remembers of
        them.
        """
        shard.load([(part, part.meta) for part in parts])
        self.age, self.age_before = (max(int(part.meta[name]) for part in parts) for name in ("age", "age_before"))
        own = parts[-1]
        anew = self.mode != "sync" and len(own.meta.get("watermarks", ())) != len(self.members.all)
        if anew and self.strategy.evict_by == STEPS:
            self.age_before = self.age
        # of an older trainer the order is not told; vectors of another one would be of other parameters
        moved = bool(own.layout) and Layout.parsed(own.layout).pieces != shard.layout.pieces
        if same and not anew and not (moved and isinstance(rule, Async)):
            rule.load({name.removeprefix(RULE): own[name] for name in own if name.startswith(RULE)})

    # --- ages and rates --------------------------------------------------------------------------------------------

    def grow_older(self, age: int) -> int:
        """Raise the age of rows to a worker's age if that is greater, so that rows which a slow worker touches get the
        present age. Returns the age."""
        shard, _ = self.opened()
        if not self.age and self.strategy.evict_by != STEPS:
            for table in shard.tables.values():
                table.count_from(age)
        self.age = max(self.age, age + self.age_before)
        return self.age

    def shrink(self, message: Message) -> Message:
        """SHRINK: drop rows that nobody has touched for so long, in steps or in the data's own time."""
        shard, _ = self.opened()
        age = int(message.mapping()["age"])
        if age < 1:
            raise Malformed(f"age {age}")
        older = self.age - age
        removed = sum(table.shrink(older) for table in shard.tables.values()) if older > 0 else 0
        return Message(Verb.DONE, records=[text({"removed": removed})])

    def rate(self, message: Message) -> Message:
        """RATE: set the factor of a schedule that follows validations, which servers do not see."""
        shard, _ = self.opened()
        scale = float(message.mapping()["scale"])
        if not isinstance(shard.schedule, Plateau) or not 0.0 <= scale <= 1.0:
            raise Malformed(f"a rate of {scale}")
        shard.schedule.scale = scale
        return Message(Verb.DONE, clock=self.version)
