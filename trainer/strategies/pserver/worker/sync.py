"""The worker of strategy=pserver_sync: servers combine all workers' gradients, apply them once, and all pull."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.schema import PserverSyncStrategy
from trainer.strategies.contract import Agreed, Share, Strategy
from trainer.strategies.pserver.protocol.messages import Kind, Message, Record, Verb
from trainer.strategies.pserver.worker.ahead import wanted
from trainer.strategies.pserver.worker.push import WholePush
from trainer.strategies.pserver.worker.worker import PserverWorker


class PserverSync(PserverWorker):
    """A worker of strategy=pserver_sync: pushes gradients times the denominator of their loss, and pulls the next
    parameters."""

    Options = PserverSyncStrategy
    options: PserverSyncStrategy

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.stale = False
        self.denominator: float | None = None

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
        """Pull the dense parameters that contain all steps so far."""
        self.pulls.receive(self.pulls.fetch({}, dense=True, clock=self.clock))

    def take_all(self) -> None:
        self.pulls.receive(self.pulls.fetch({}, dense=True, clock=self.clock, flags=0))
        self.base = self.pulls.versions[0] - self.steps
        self.stale = False

    def weight(self, denominator: float) -> float:
        self.denominator = denominator
        return 1.0

    def step(self, samples: int) -> None:
        rows = {t.number: t.gradient() for t in self.remote}
        by = samples if self.denominator is None else self.denominator
        rows = {n: (ids, g * by) for n, (ids, g) in rows.items()}
        dense = self.gradients(by)
        clock = self.clock + 1
        push = WholePush(dense, rows, samples, clock, self.age(), self.pulls.versions, [], denominator=by)
        pushes = self.client.push(self.encoder.messages(push))
        if self.options.clip_norm is not None:
            square = sum(float(a.need(Kind.NUMBERS)[0]) for a in self.client.wait(pushes))
            norm = Record(Kind.NUMBERS, np.array([square**0.5]))
            for server in self.client.servers:
                self.client.ask(server, Message(Verb.COMMIT, clock=clock - 1, records=[norm]))
        self.drop_gradients()
        self.steps += 1
        self.stale = True
        coming = self.ahead.coming()  # its ids are sorted while the servers take the push
        if coming is not None:
            self.ahead.fetched = coming, self.pulls.fetch(wanted(coming), dense=True, clock=self.clock)

    def next_meeting(self, step: int) -> int:
        """Return step + 2, because another worker may be a whole update ahead.
        An update ends when its gradients are pushed, and begins when all have pushed those of the one before."""
        return step + 2

    def load(self, folder: Path, share: Share) -> None:
        super().load(folder, share)
        self.ahead.received = None  # the servers have the same, and for any number of workers
        self.base = self.pulls.versions[0] - self.steps
        self.stale = True

    def agree(self, action: Callable[[int, int], Agreed], settle: Callable[[], None] = lambda: None) -> Agreed:
        if self.options.on_lost_worker == "continue":
            return super().agree(action, settle)
        return Strategy.agree(self, action, settle)  # a lost worker ends the run

    def finish_pushes(self) -> None:
        self.client.wait([r for r in self.client.under_way.values() if r.message.verb in (Verb.PUSH, Verb.COMMIT)])
