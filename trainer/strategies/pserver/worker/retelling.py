"""What a worker tells a restarted server, which knows no more than its last snapshot."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from trainer.optim.updater import Updater
from trainer.strategies.pserver.protocol.messages import FINISHED, PRESENT, STOPS, Kind, Message, Record, Verb, text
from trainer.strategies.pserver.worker.client import Client
from trainer.strategies.pserver.worker.held_blocks import HeldBlocks


class Retelling:
    """The part of a pserver worker that remembers what a restarted server must be told.
    That is the last sums, its blocks, its steps, and which version of the parameters it has had."""

    client: Client
    work: HeldBlocks
    updater: Updater

    def retell(self) -> None:
        """From now on tell restarted servers what they have forgotten. Called once this worker has its parameters."""
        self.client.tells, self.client.asks_first = self.told, self.asked_first

    def told(self, server: int) -> list[Record]:
        """The records of a HELLO to a server, with what it may have forgotten."""
        sums, records = [], []
        for stops in (0, 1):
            number, answer = self._last_sum(stops)
            sums.append(number)
            if answer is not None:
                records += [Record(Kind.NUMBERS, answer.need(Kind.NUMBERS), stops)]
                records += [Record(Kind.IDS, answer.need(Kind.IDS), PRESENT + stops)]
        body: dict[str, Any] = {"version": self.client.versions[server], "sums": sums, **self.steps_at(server)}
        if server == 0:
            body |= self.work.told()
            records.append(Record(Kind.IDS, np.array(sorted(self.work.all_finished), dtype=np.int64), FINISHED))
        if self.updater.plateau is not None:
            body |= {"scale": self.updater.plateau.scale}
        return [text(body), *records]

    def _last_sum(self, stops: int) -> tuple[int, Message | None]:
        """Number of the last sum that all had come to, and its answer, if this worker has it."""
        client = self.client
        number = client.stops if stops else client.meetings
        meets = [r.message for r in client.under_way.values() if r.message.verb == Verb.MEET]
        number -= any((m.flags & STOPS, m.clock) == (stops, number) for m in meets)
        known, answer = client.sums.get(stops, (0, None))
        return number, answer if known == number else None

    def keep_sum(self, message: Message) -> partial[None]:
        """Return the callback that remembers the answer to a MEET."""
        return partial(self._keep, message.flags & STOPS, message.clock)

    def _keep(self, stops: int, number: int, answer: Message) -> None:
        self.client.sums[stops] = number, answer

    def steps_at(self, server: int) -> dict[str, int | None]:
        """This worker's steps for servers that count them: ``clock`` and ``done``.
        ``clock``: as that server must count them before it gets again what is under way (None: this worker rests);
        ``done``: with the last push that the server has acknowledged."""
        return {}

    def asked_first(self, server: int) -> list[Any]:
        """Requests to a restarted server that come before all others, each with a callback for its answer."""
        return []
