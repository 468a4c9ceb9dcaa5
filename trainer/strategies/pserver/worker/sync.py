"""strategy=pserver_sync: all workers' gradients of a step are combined at the servers, applied once, pulled by all."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainer.strategies.pserver.protocol.messages import Kind, Message, Record, Verb
from trainer.strategies.pserver.worker.worker import PserverWorker


class PserverSync(PserverWorker):
    """Pushes sums of gradients weighted by samples; pulls parameters of the next step as soon as they are made."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.stale = False

    @property
    def clock(self) -> int:
        return self.base + self.steps

    base = 0

    def prepare(self, batch: Any) -> None:
        self.note(batch)
        if not self.take_fetched() and self.stale:
            self.take_current()
        self.stale = False

    def take_current(self) -> None:
        """The dense parameters that contain all steps so far."""
        self.receive(self.fetch({}, dense=True, clock=self.clock))

    def take_all(self) -> None:
        fetched = self.fetch({}, dense=True, clock=self.clock, flags=0)
        self.receive(fetched)
        assert fetched.requests[0].answer is not None
        self.base = fetched.requests[0].answer.clock - self.steps
        self.stale = False

    def step(self, samples: int) -> None:
        rows = {t.number: t.gradient() for t in self.remote}
        rows = {n: (ids, g * samples) for n, (ids, g) in rows.items()}
        dense = [self.dense.gradients(s, samples) for s in self.client.servers]
        work, _ = self.work_record()
        clock = self.clock + 1
        pushes = self.client.push(self.push_messages(dense, rows, samples, clock, work))
        if self.config["clip_norm"] is not None:
            square = sum(float(a.need(Kind.NUMBERS)[0]) for a in self.client.wait(pushes))
            norm = Record(Kind.NUMBERS, np.array([square**0.5]))
            for server in self.client.servers:
                self.client.ask(server, Message(Verb.COMMIT, clock=clock - 1, records=[norm]))
        self.drop_gradients()
        self.steps += 1
        self.stale = True
        if self.coming is not None:
            wanted = {n: once for n, (_, once, _) in self.coming.items()}
            self.fetched = self.coming, self.fetch(wanted, dense=True, clock=self.clock)
            self.coming = None

    def finish_pushes(self) -> None:
        self.client.wait([r for r in self.client.under_way.values() if r.message.verb in (Verb.PUSH, Verb.COMMIT)])
