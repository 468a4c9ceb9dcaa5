"""Leased work, as a worker sees it: which batches its next push covers, and which blocks it has finished."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trainer.strategies.contract import Lease
from trainer.strategies.pserver.protocol.messages import Kind, Message, Record, Verb, text
from trainer.strategies.pserver.worker.client import Client


class LeasedWork:
    """Blocks of this worker.

    Attributes:
        must_push: the batch that is computed now is the last before a server's own mark: a push must end with it.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.must_push = False
        self._computed: list[list[int]] = []
        self._at_their_end: dict[int, bool] = {}
        self._done: list[int] = []
        self._cuts: dict[tuple[int, int], tuple[int, ...]] = {}

    def note(self, work: tuple[int, int, int, bool] | None) -> None:
        """A batch is computed now: its epoch, block, number in it, and whether it is the block's last."""
        if work is None:
            return
        epoch, block, index, last = work
        if self._computed and self._computed[-1][:2] == [epoch, block] and self._computed[-1][3] == index:
            self._computed[-1][3] = index + 1
        else:
            self._computed.append([epoch, block, index, index + 1])
        if last:
            self._at_their_end[block] = True
        self.must_push = index + 1 in self._cuts.get((epoch, block), ())

    def covered(self) -> tuple[list[Record], list[int]]:
        """What the push that is made now covers, and the blocks that it finishes."""
        if not self._computed:
            return [], []
        array = np.array(self._computed, dtype=np.int64)
        finished = [block for block in self._at_their_end if block in {w[1] for w in self._computed}]
        for block in finished:
            del self._at_their_end[block]
        self._computed = []
        return [Record(Kind.WORK, array)], finished

    def acknowledged(self, blocks: list[int]) -> None:
        """The pushes that finish these blocks are applied."""
        self._done += blocks

    def ask(self, epoch: int, blocks: int) -> dict[str, Any] | None:
        """Tell which blocks are done, and ask server 0 for another; None: there is nothing just now."""
        self.client.take()
        done, self._done = self._done, []
        request = {"epoch": epoch, "blocks": blocks, "done": done}
        [answer] = self.client.wait([self.client.ask(0, Message(Verb.LEASE, records=[text(request)]))])
        told: dict[str, Any] = answer.text()
        return None if told["block"] < 0 and not told["over"] else told

    def lease(self, epoch: int, told: Mapping[str, Any]) -> Lease:
        """The block that was handed out, from where the worker that had it before has come to."""
        block = int(told["block"])
        start = self._take_over(epoch, block, *told["fence"]) if told["fence"] else 0
        return Lease(block, start, lambda: self.acknowledged([block]))

    def _take_over(self, epoch: int, block: int, rank: int, incarnation: int) -> int:
        body = {"rank": rank, "incarnation": incarnation, "epoch": epoch, "block": block}
        asks = [self.client.ask(s, Message(Verb.FENCE, records=[text(body)])) for s in self.client.servers]
        start, *cuts = sorted({int(a.need(Kind.NUMBERS)[0]) for a in self.client.wait(asks)})
        print(f"takes over block {block} of worker {rank} from its batch {start} on", flush=True)
        self._cuts[epoch, block] = tuple(cuts)
        return start
