"""A server that was started again: it is what it was at its snapshot, and asks every worker what it has missed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.strategies.pserver.protocol.messages import ACKNOWLEDGED, FINISHED, PRESENT, TELLS, Kind, Message
from trainer.strategies.pserver.server.answers import NotYet
from trainer.strategies.pserver.server.epoch_blocks import Holder, Leases
from trainer.strategies.pserver.server.members import Member, Members
from trainer.strategies.pserver.server.parameters import Parameters
from trainer.strategies.pserver.server.totals import Meetings, ToldSum


@dataclass
class Regained:
    """What a server that was started again regains from its workers. It takes nothing else before all who take part
    have said HELLO, or are lost: leases, steps and sums would be wrong.

    Attributes:
        again: this server was started again; False: it is in its first life, and nothing here does anything.
    """

    again: bool
    members: Members
    parameters: Parameters
    leases: Leases
    meetings: Meetings

    def check(self) -> None:
        """Called before a request is answered.

        Raises:
            NotYet: not all workers have told what they have.
        """
        if self.again and (missing := self.members.awaited()):
            raise NotYet(missing, "what it has of the life before of this server", limited=False)

    def begin(self, member: Member, message: Message) -> None:
        """The first HELLO of a worker's life has come here, and its watermark begins."""
        told = message.mapping() if message.flags & TELLS else {}
        acknowledged = message.first(Kind.IDS, ACKNOWLEDGED)
        for sequence in () if acknowledged is None else acknowledged.tolist():
            member.watermark.mark(int(sequence))
        shard, rule = self.parameters.opened()
        shard.skip_to(int(told.get("version", 0)))
        mark = member.watermark
        rule.told(member.rank, told.get("clock"), {mark.greatest: int(told.get("done", 0))} if mark.above else {})
        if (scale := told.get("scale")) is not None:
            self.parameters.take_scale(float(scale))
        self.meetings.told(*(_sum(message, told, which) for which in range(2)))
        finished = message.first(Kind.IDS, FINISHED)
        self.leases.told(
            Holder(member.rank, member.life),
            int(told.get("epoch", -1)),
            int(told.get("blocks", 0)),
            [int(block) for block in told.get("held", ())],
            [] if finished is None else finished.tolist(),
        )


def _sum(message: Message, told: dict[str, Any], which: int) -> ToldSum:
    """The last sum of the training (0), or of a stop (1)."""
    value, present = message.first(Kind.NUMBERS, which), message.first(Kind.IDS, PRESENT + which)
    return ToldSum(int(told.get("sums", (0, 0))[which]), value, [] if present is None else present.tolist())
