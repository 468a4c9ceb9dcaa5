"""Who comes, who leaves, who is lost, and what that means for everybody else."""

from __future__ import annotations

import numpy as np
from torch.distributed import Store

from trainer.errors import RunFailed
from trainer.strategies.pserver.protocol.messages import Kind, Message, Record, Verb
from trainer.strategies.pserver.server.answers import failed
from trainer.strategies.pserver.server.leases import Leases
from trainer.strategies.pserver.server.members import Members
from trainer.strategies.pserver.server.parameters import Parameters
from trainer.strategies.pserver.server.rules import Geo, Sync
from trainer.strategies.pserver.server.turns import Turns


class Liveness:
    """Members that come and go.

    Args:
        store: the launcher's; it says whose process has ended, and is told who is lost.
        stops: the run ends when a worker is lost.
    """

    def __init__(
        self, members: Members, parameters: Parameters, leases: Leases, turns: Turns, store: Store | None,
        stops: bool,
    ) -> None:  # fmt: skip
        self.members, self.parameters, self.leases, self.turns = members, parameters, leases, turns
        self.store, self.stops = store, stops

    def hello(self, message: Message) -> Message:
        """HELLO: a worker comes. The answer: its incarnation, its pushes that are applied, the longest frame that is
        taken."""
        rank, life = message.rank, message.sequence
        before = self.members.all[rank].incarnation
        if life in self.members.all[rank].lives[:-1]:
            return failed(f"worker {rank} was started again", fenced=True)
        member = self.members.hello(rank, life)
        if member.incarnation > before:
            if before:
                self._forget_life_before(rank)
            print(f"worker {rank} has come, life {member.incarnation}, {member.watermark.done} pushes done", flush=True)
        numbers = np.array([self.turns.socket.most_bytes, member.watermark.greatest], dtype=np.float64)
        return Message(
            Verb.DONE, incarnation=member.incarnation, sequence=member.watermark.done, clock=self.parameters.version,
            records=[Record(Kind.NUMBERS, numbers)],
        )  # fmt: skip

    def _forget_life_before(self, rank: int) -> None:
        self.turns.drop(rank, f"worker {rank} was started again")
        self.leases.lose(rank)
        if self.parameters.shard is not None and isinstance(self.parameters.rule, Geo):
            for table in self.parameters.shard.tables.values():
                table.forget(rank)

    def bye(self, message: Message) -> Message:
        """BYE: a worker has finished."""
        member = self.members.all[message.rank]
        if member.present:
            member.left = True
            self.leases.lose(message.rank)
            self._changed()
        return Message(Verb.DONE)

    def look_after(self) -> None:
        """Who is silent, or whose process has ended, is lost."""
        for rank in self.members.silent():
            self.lose(rank, f"nothing was heard of it for {self.members.lost_after_s:g} s")
        for rank in self.members.present():
            if self.store is not None and self.store.check([f"lost/worker/{rank}"]):
                self.lose(rank, "its process ended")

    def lose(self, rank: int, why: str) -> None:
        """A worker is gone: nothing more is taken from it, its work goes to others.

        Raises:
            RunFailed: the run is a sync one that has to stop.
        """
        print(f"worker {rank} is lost: {why}", flush=True)
        self.members.lose(rank, why)
        if self.store is not None:
            self.store.set(f"fenced/worker/{rank}", why)  # its launcher ends it when nothing else runs
        self.leases.lose(rank)
        if self.stops and isinstance(self.parameters.rule, Sync):
            self.turns.fail_all(f"worker {rank} was lost: {why}")
            raise RunFailed(f"worker {rank} was lost: {why} (strategy.on_lost_worker=stop)")
        self.turns.drop(rank, f"worker {rank} was declared lost: {why}")
        self._changed()

    def _changed(self) -> None:
        if self.parameters.rule is not None:
            self.parameters.rule.changed()
        self.turns.try_again()
