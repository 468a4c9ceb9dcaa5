"""Whatever happens in whatever order, every block of an epoch ends: finished once, or dropped with its lost worker."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.strategies.pserver.server.epoch_blocks import NOBODY, Answer, Holder, Leases, Progress
from trainer.strategies.pserver.server.members import Watermark

WORKERS = 4
BATCHES = 3


class Play:
    """Workers that ask, push batches, report blocks and die, over the real leases and one server's real progress."""

    def __init__(self, blocks: int, take_over: bool) -> None:
        self.leases, self.progress, self.blocks = Leases(take_over), Progress(), blocks
        self.alive = set(range(WORKERS))
        self.at: dict[int, tuple[int, int]] = {}  # worker -> its block and next batch
        self.done: dict[int, list[int]] = {r: [] for r in range(WORKERS)}
        self.over: set[int] = set()
        self.applied: list[tuple[int, int]] = []

    def act(self, rank: int, dies: bool) -> None:
        """One step of a worker."""
        if rank not in self.alive or rank in self.over:
            return
        if dies and len(self.alive) > 1:
            self.alive.remove(rank)
            self.leases.lose(rank)
            self.at.pop(rank, None)
        elif rank in self.at:
            self._push(rank)
        else:
            self._ask(rank)

    def _push(self, rank: int) -> None:
        block, batch = self.at[rank]
        work = np.array([[0, block, batch, batch + 1]])
        if not self.progress.covered(work):
            self.applied.append((block, batch))
        self.progress.mark(work)
        if batch + 1 < BATCHES:
            self.at[rank] = block, batch + 1
        else:
            del self.at[rank]
            self.done[rank].append(block)

    def _ask(self, rank: int) -> None:
        done, self.done[rank] = self.done[rank], []
        answer = self.leases.ask(Holder(rank, 1), 0, self.blocks, done)
        if answer is None:
            return
        if answer.over:
            self.over.add(rank)
            return
        start = self.progress.of(0, answer.block).first_gap()
        if start >= BATCHES:  # all was pushed before its worker died; only the report is missing
            self.done[rank].append(answer.block)
        else:
            self.at[rank] = answer.block, start


@given(
    blocks=st.integers(0, 8),
    take_over=st.booleans(),
    story=st.lists(st.tuples(st.integers(0, WORKERS - 1), st.integers(0, 9)), max_size=120),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_every_block_is_finished_once_or_dropped(blocks: int, take_over: bool, story: list[tuple[int, int]]) -> None:
    play = Play(blocks, take_over)
    for rank, dice in story:
        play.act(rank, dies=dice == 0)
    for _ in range(blocks * (BATCHES + 2) + 3):
        for rank in sorted(play.alive):
            play.act(rank, dies=False)
    epoch = play.leases.epoch
    assert play.alive == play.over & play.alive, "somebody waits for ever"
    assert not epoch.out and not epoch.orphans
    assert len(play.applied) == len(set(play.applied)), "a batch was applied twice"
    everything = {(block, batch) for block in range(blocks) for batch in range(BATCHES)}
    if take_over:
        assert epoch.finished == set(range(blocks)) and set(play.applied) == everything
    else:
        assert epoch.finished | epoch.dropped == set(range(blocks)) and not epoch.finished & epoch.dropped
        assert {b for b, _ in everything - set(play.applied)} <= epoch.dropped


@given(st.permutations(range(1, 30)), st.lists(st.integers(1, 29), max_size=30))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_watermark_counts_every_push_once_in_any_order(order: list[int], again: list[int]) -> None:
    mark, applied = Watermark(), []
    for number in [*order[:15], *again, *order[15:], *order]:
        if not mark.seen(number):
            applied.append(number)
            mark.mark(number)
    assert sorted(applied) == list(range(1, 30))
    assert mark.done == 29 and not mark.above


def test_worker_that_goes_on_gets_its_own_block_before_one_that_nobody_has() -> None:
    """The checkpoint has the rows of its own block's next batch."""
    leases = Leases()
    leases.load(6, epoch=0, blocks=3, next=2, finished=(), dropped=(), kept=((0, NOBODY), (1, 5)))
    asked = [leases.ask(Holder(5, 77), 0, 3, ()) for _ in range(3)]
    assert asked == [Answer(1, again=True), Answer(0, again=True), Answer(2)]


def test_block_of_a_worker_that_there_is_no_more_is_anybodys() -> None:
    leases = Leases()
    leases.load(2, epoch=0, blocks=3, next=3, finished=((0, 1),), dropped=(), kept=((1, 1), (2, 2)))
    assert leases.ask(Holder(0, 77), 0, 3, ()) == Answer(2, again=True)
    assert leases.ask(Holder(0, 77), 0, 3, ()) is None, "block 1 waits for worker 1"
    assert leases.ask(Holder(1, 78), 0, 3, ()) == Answer(1, again=True)


def test_who_asks_for_work_of_an_earlier_epoch_is_told_that_the_epoch_is_over() -> None:
    leases = Leases()
    assert leases.ask(Holder(0, 77), 1, 2, ()) == Answer(0)
    before = leases.state()
    assert leases.ask(Holder(1, 78), 0, 2, (0, 1)) == Answer(over=True)
    assert leases.state() == before, "blocks of the present epoch have the same numbers"


def test_batch_that_one_of_several_servers_has_applied_counts_as_applied() -> None:
    """A lost worker's last push came to some of them alone."""
    progress = Progress()
    for epoch, applied in (
        (1, {"7": [(0, 3)]}),
        (2, {"0": [(0, 2), (4, 5)]}),
        (2, {"0": [(0, 4)], "1": [(1, 2)]}),
        (1, {"0": [(5, 9)]}),
    ):
        progress.load(epoch=epoch, applied=applied)
    assert progress.state() == {"epoch": 2, "applied": {"0": [(0, 5)], "1": [(1, 2)]}}
