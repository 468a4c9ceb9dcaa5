"""A worker goes on in a block that it, or a lost worker, had at a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from trainer.strategies.contract import Lease
from trainer.strategies.pserver.protocol.messages import Kind, Message, Record, Verb, text
from trainer.strategies.pserver.server.epoch_blocks import Progress
from trainer.strategies.pserver.worker.held_blocks import Handed, HeldBlocks

BATCHES = 6
AGAIN = Handed(0, [], over=False, again=True)


class Servers:
    """What each server has of block 0, as the client of a worker: it asks at once."""

    def __init__(self, has: Iterable[Iterable[tuple[int, int]]]) -> None:
        self.progress = [Progress() for _ in has]
        for progress, parts in zip(self.progress, has, strict=True):
            progress.load(0, {"0": parts})
        self.servers = range(len(self.progress))

    def take(self) -> None:
        """Nothing comes later."""

    def ask(self, server: int, message: Message, note: Any = None) -> Message:
        if message.verb == Verb.LEASE:
            nothing = {"block": -1, "fence": [], "over": False, "again": False}
            return Message(Verb.DONE, records=[text(nothing)])
        rows = [[0, 0, *part] for part in self.progress[server].of(0, 0)]
        return Message(Verb.DONE, records=[Record(Kind.WORK, np.array(rows, dtype=np.int64).reshape(-1, 4))])

    def wait(self, answers: list[Message]) -> list[Message]:
        return answers

    def push(self, work: HeldBlocks) -> None:
        """All that is computed, at all servers. One that has a part of it, and lacks another, refuses it."""
        covered = work.covered()
        for record in covered.records:
            for progress in self.progress:
                progress.covered(record.array)
                progress.mark(record.array)
        work.acknowledged(covered)


def goes_on(servers: Servers, computed: list[tuple[int, int]], at_its_end: bool) -> tuple[HeldBlocks, Lease]:
    """A worker that has computed these batches of block 0, and those of another block, and gets block 0 again."""
    client: Any = servers
    work = HeldBlocks(client)
    work.load([[0, 0, *part] for part in computed], [0] if at_its_end else [])
    lease = work.lease(0, AGAIN)
    if work.torn:
        servers.push(work)
    return work, lease


@pytest.mark.parametrize("computed", [[], [(2, 3)]], ids=["nothing", "a batch"])
@pytest.mark.parametrize("has", [[[(0, 2)], [(0, 5)]], [[(0, 2)], [(0, 4), (5, 6)]]])
def test_a_push_ends_where_only_some_servers_have_what_follows(has: Any, computed: list[tuple[int, int]]) -> None:
    """A lost worker's last push came to the second server alone."""
    servers = Servers(has)
    work, lease = goes_on(servers, computed, at_its_end=False)
    assert work.torn and lease.start == 2 + len(computed)
    for index in range(lease.start, BATCHES):
        work.note((0, 0, index, index == BATCHES - 1))
        if work.must_push:
            servers.push(work)
            work.must_push = False
    work.note((0, 1, 0, False))
    servers.push(work)
    assert [[*p.of(0, 0)] for p in servers.progress] == [[(0, BATCHES)]] * len(servers.progress)
    assert work._done == [0]


@pytest.mark.parametrize(
    ("has", "computed"), [([[(0, 2)]], [(2, 6)]), ([[(0, 5)], [(0, 5)]], [(5, 6)]), ([[]], [(0, 6)])]
)
def test_what_is_computed_next_stays_pending(has: Any, computed: list[tuple[int, int]]) -> None:
    """The run has the numbers then that it would have had."""
    servers = Servers(has)
    work, lease = goes_on(servers, computed, at_its_end=True)
    assert not work.torn and lease.start == BATCHES
    lease.empty()
    assert not work._done
    servers.push(work)
    assert work._done == [0]
