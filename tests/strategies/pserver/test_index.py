"""Both indexes against a dict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trainer.strategies.pserver.tables.index import DIRECT, DirectIndex, HashIndex, index_of

BIGGEST = 2**63 - 1
ids_of_few = st.lists(
    st.one_of(st.integers(0, 60), st.integers(0, BIGGEST), st.just(BIGGEST)), max_size=40, unique=True
).map(lambda ids: np.array(ids, dtype=np.int64))


class AgainstADict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index, self.truth = HashIndex(), {}

    @rule(ids=ids_of_few)
    def add(self, ids):
        taken, free = set(self.truth.values()), self.index.high - len(self.truth)
        new = [id_ for id_ in ids.tolist() if id_ not in self.truth]
        before = self.index.high
        slots = self.index.add(ids)
        for id_, slot in zip(ids.tolist(), slots.tolist(), strict=True):
            assert self.truth.setdefault(id_, slot) == slot
        fresh = {self.truth[id_] for id_ in new}
        assert len(fresh) == len(new) and not fresh & taken
        assert self.index.high == before + max(0, len(new) - free)  # slots set free were used first

    @rule(ids=ids_of_few)
    def remove(self, ids):
        freed = self.index.remove(ids)
        assert sorted(freed.tolist()) == sorted(self.truth.pop(i) for i in ids.tolist() if i in self.truth)

    @rule(ids=ids_of_few)
    def find(self, ids):
        assert self.index.find(ids).tolist() == [self.truth.get(i, -1) for i in ids.tolist()]

    @invariant()
    def holds_the_same(self):
        assert len(self.index) == len(self.truth)
        assert dict(zip(self.index.ids().tolist(), self.index.slots().tolist(), strict=True)) == self.truth


TestAgainstADict = AgainstADict.TestCase
TestAgainstADict.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)

few_small = st.lists(st.integers(0, 99), max_size=40, unique=True).map(lambda ids: np.array(ids, dtype=np.int64))


class DirectAgainstADict(AgainstADict):
    def __init__(self) -> None:
        super().__init__()
        self.index = DirectIndex(100)

    @rule(ids=few_small)
    def add(self, ids):
        super().add(ids)

    @rule(ids=few_small)
    def remove(self, ids):
        super().remove(ids)

    @rule(ids=few_small)
    def find(self, ids):
        super().find(ids)


TestDirectAgainstADict = DirectAgainstADict.TestCase
TestDirectAgainstADict.settings = TestAgainstADict.settings


def test_tables_with_an_end_have_an_array_and_no_more_than_that():
    assert type(index_of(100)) is DirectIndex and index_of(100).nbytes() == 400
    assert type(index_of(DIRECT + 1)) is type(index_of(None)) is HashIndex


def test_a_hundred_thousand_ids_in_one_call_and_in_many():
    ids = np.random.default_rng(0).choice(2**40, 100_000, replace=False)
    once, often = HashIndex(), HashIndex()
    assert once.add(ids).tolist() == list(range(len(ids)))
    for part in np.array_split(ids, 37):
        often.add(part)
    assert (often.find(ids) == np.arange(len(ids))).all()
    assert (often.find(ids + 2**41) == -1).all()


def test_repeated_ids_are_found_each_time():
    index = HashIndex()
    index.add(np.array([7, 9]))
    assert index.find(np.array([9, 9, 8, 7])).tolist() == [1, 1, -1, 0]


def test_ids_that_come_and_go_leave_the_table_its_size():
    index = HashIndex()
    for step in range(300):
        index.add(np.arange(100) + step * 100)
        index.remove(np.arange(100) + step * 100)
    assert index.high == 100 and index.nbytes() < 10_000


def test_negative_ids_are_refused_and_no_ids_are_fine():
    index = HashIndex()
    for call in (index.find, index.add, index.remove):
        assert len(call(np.empty(0, dtype=np.int64))) == 0
        with pytest.raises(ValueError, match="-1"):
            call(np.array([3, -1]))
    assert len(index) == 0
