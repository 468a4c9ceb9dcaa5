"""SparseTable: rows as drawn, updated as by one optimizer, whatever the number of servers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.strategies.pserver.states import whole
from trainer.strategies.pserver.protocol.sharding import buckets_of, server_of_bucket
from trainer.strategies.pserver.server.admission import Count, Probability
from trainer.strategies.pserver.server.sparse_table import SparseTable
from trainer.strategies.pserver.tables.kernels import kernel
from trainer.weights.fresh_rows import RowInit, draw_rows, table_key

DIM, SEED, INIT = 3, 5, RowInit("normal", 0.5)
KEY = table_key(SEED, "user")
ids_of_few = st.lists(st.one_of(st.integers(0, 25), st.integers(0, 2**63 - 1)), max_size=12, unique=True)
operations = st.lists(st.tuples(st.sampled_from(["pull", "peek", "push", "shrink"]), ids_of_few), max_size=15)
kernels = st.sampled_from(["sgd", "adagrad", "rowwise_adagrad", "adam"])
admissions = st.sampled_from([None, Count(2), Probability(0.5)])


def table(optimizer="adagrad", dtype=torch.float64, **options) -> SparseTable:
    return SparseTable("user", DIM, dtype, SEED, INIT, kernel(optimizer, initial_accumulator_value=0.1), **options)


def array(ids) -> np.ndarray:
    return np.array(list(ids), dtype=np.int64)


def drawn(ids) -> torch.Tensor:
    return torch.from_numpy(draw_rows(KEY, array(ids), DIM, INIT))


def gradients_of(ids: np.ndarray, step: int) -> torch.Tensor:
    """(U, DIM) numbers that follow from id and step, so that they do not depend on who computes them."""
    return torch.from_numpy(draw_rows(table_key(step, "gradients"), ids, DIM, RowInit("normal", 1.0)))


class Servers:
    """Several tables with the rows split by bucket, used as one."""

    def __init__(self, count: int, optimizer: str, dtype=torch.float64, **options) -> None:
        self.dtype = dtype
        self.tables = [table(optimizer, dtype, **options) for _ in range(count)]

    def of(self, ids: np.ndarray) -> np.ndarray:
        return server_of_bucket(len(self.tables))[buckets_of(KEY, ids)]

    def do(self, step: int, verb: str, ids: np.ndarray) -> torch.Tensor:
        out = torch.zeros(len(ids), DIM, dtype=self.dtype)
        for server, shard in enumerate(self.tables):
            where = np.flatnonzero(self.of(ids) == server)
            if verb == "push":
                shard.push(ids[where], gradients_of(ids[where], step).to(self.dtype), 0.1, step, clock=step)
            elif verb == "shrink":
                shard.shrink(step - 2)
            else:
                out[where] = shard.pull(ids[where], create=verb == "pull", clock=step)
        return out

    def state(self) -> dict[str, torch.Tensor]:
        """All states as one, in the order of the ids."""
        states = [whole(shard.state()) for shard in self.tables]
        joined = {name: torch.cat([state[name] for state in states]) for name in states[0]}
        rows, waiting = joined["ids"].argsort(), joined["waiting_ids"].argsort()
        return {name: part[waiting if name.startswith("waiting") else rows] for name, part in joined.items()}

    def load_from(self, others: Servers) -> Servers:
        for server, shard in enumerate(self.tables):
            for other in others.tables:
                shard.load(whole(other.state()), lambda ids, server=server: self.of(ids) == server)
        return self


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]), name


@settings(deadline=None, max_examples=30)
@given(operations, kernels, admissions, st.sampled_from([torch.float32, torch.float64]), st.randoms())
def test_one_table_equals_three_split_by_bucket(operations, optimizer, admission, dtype, random):
    one, three = (Servers(count, optimizer, dtype, admission=admission) for count in (1, 3))
    for step, (verb, ids) in enumerate(operations, start=1):
        shuffled = random.sample(range(len(ids)), len(ids))
        ids = array(ids)
        found = three.do(step, verb, ids[shuffled])
        assert torch.equal(one.do(step, verb, ids)[shuffled], found)
    assert_same(one.state(), three.state())
    assert one.tables[0].dropped == sum(shard.dropped for shard in three.tables)


@settings(deadline=None, max_examples=20)
@given(operations, operations, kernels, admissions)
def test_saved_by_one_read_by_three_read_by_two_goes_on_the_same(before, after, optimizer, admission):
    one = Servers(1, optimizer, admission=admission)
    for step, (verb, ids) in enumerate(before, start=1):
        one.do(step, verb, array(ids))
    two = Servers(2, optimizer, admission=admission)
    two.load_from(Servers(3, optimizer, admission=admission).load_from(one))
    assert_same(one.state(), two.state())
    for step, (verb, ids) in enumerate(after, start=len(before) + 1):
        assert torch.equal(one.do(step, verb, array(ids)), two.do(step, verb, array(ids)))
    assert_same(one.state(), two.state())


@pytest.mark.parametrize(("optimizer", "theirs"), [("sgd", torch.optim.SGD), ("adam", torch.optim.SparseAdam)])
def test_pushes_equal_torch_optim_on_the_same_rows(optimizer, theirs):
    rows = table(optimizer, num_rows=200)
    embedding = nn.Embedding(200, DIM, sparse=True, _weight=drawn(range(200)))
    reference = theirs(embedding.parameters(), lr=0.1)
    for step in range(1, 40):
        ids = np.random.default_rng(step).choice(200, 40, replace=False)
        np.testing.assert_allclose(rows.pull(ids), embedding.weight.detach()[ids], rtol=0, atol=1e-12)
        reference.zero_grad()
        (embedding(torch.from_numpy(ids)) * gradients_of(ids, step)).sum().backward()
        reference.step()
        rows.push(ids, gradients_of(ids, step), 0.1, step, clock=step)
    np.testing.assert_allclose(rows.pull(array(range(200))), embedding.weight.detach(), rtol=0, atol=1e-12)


def test_evaluation_sees_fresh_rows_and_makes_none():
    rows = table()
    rows.push(array([4]), torch.ones(1, DIM, dtype=torch.float64), 0.1, 1, clock=1)
    seen = rows.pull(array([9, 4, 2**63 - 1]), create=False)
    assert len(rows) == 1
    assert torch.equal(seen[[0, 2]], drawn([9, 2**63 - 1])) and not torch.equal(seen[1:2], drawn([4]))
    seen.zero_()
    assert rows.pull(array([4])).abs().sum() > 0  # what was pulled is a copy


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_an_update_that_fails_leaves_value_and_optimizer_state_as_they_were(optimizer):
    rows = table(optimizer)
    ids = array(range(10))
    rows.push(ids, gradients_of(ids, 1), 0.1, 1, clock=1)
    before = whole(rows.state())

    class Broken:
        name, initial = rows.kernel.name, rows.kernel.initial
        state_columns = rows.kernel.state_columns

        def apply(self, values, state, gradients, lr, step):
            values.zero_()
            state.zero_()
            raise RuntimeError("half way")

    rows.kernel = Broken()
    with pytest.raises(RuntimeError):
        rows.push(ids, gradients_of(ids, 2), 0.1, 2, clock=1)
    with pytest.raises(ValueError, match="10 rows of 3"):
        rows.push(ids, gradients_of(ids, 2)[:9], 0.1, 2, clock=1)
    assert_same(whole(rows.state()), before)


def test_values_and_state_belong_together_after_growth_shrinking_and_reuse():
    """With a gradient of 1 and lr 1, Adagrad's accumulator tells by how much the value has moved."""
    rows = table("adagrad")
    random = np.random.default_rng(0)
    for step in range(1, 60):
        ids = random.choice(3000, 300, replace=False)
        rows.push(ids, torch.ones(300, DIM, dtype=torch.float64), 1.0, step, clock=step)
        rows.shrink(step - 3)
        state = whole(rows.state())
        pushes = (state["rows"][:, DIM:] - 0.1).round().long()
        moved = torch.cumsum(1 / (0.1 + torch.arange(0, 70, dtype=torch.float64)).sqrt(), 0) - 0.1**-0.5
        expected = drawn(state["ids"].numpy()) - moved[pushes]
        torch.testing.assert_close(state["rows"][:, :DIM], expected, rtol=0, atol=1e-9)


def test_a_late_message_does_not_make_rows_older_that_were_loaded():
    saved = table()
    saved.push(array([1, 2]), gradients_of(array([1, 2]), 1), 0.1, 1, clock=20)
    rows = table()
    rows.load(whole(saved.state()), lambda ids: np.ones(len(ids), dtype=bool))
    rows.push(array([1]), gradients_of(array([1]), 2), 0.1, 2, clock=5)
    assert rows.shrink(older_than=20) == 0


def test_shrink_drops_what_was_not_touched_and_it_comes_back_fresh():
    rows = table()
    ids = array(range(6))
    rows.push(ids, gradients_of(ids, 1), 0.1, 1, clock=10)
    rows.push(ids[:2], gradients_of(ids[:2], 2), 0.1, 2, clock=20)
    rows.push(ids[:2], gradients_of(ids[:2], 2), 0.1, 2, clock=5)  # a late message does not make them older
    rows.pull(ids[2:3], clock=30)
    rows.pull(ids[3:4], create=False, clock=30)  # evaluation touches nothing
    assert rows.shrink(older_than=10) == 0
    assert rows.shrink(older_than=20) == 3
    assert whole(rows.state())["ids"].tolist() == [0, 1, 2]
    assert torch.equal(rows.pull(ids[3:]), drawn([3, 4, 5]))
    assert (whole(rows.state())["rows"][3:, DIM:] == 0.1).all()
    assert rows.memory()["rows"] == 6


def test_assigned_rows_are_a_models_own_with_fresh_state():
    rows = table(admission=Count(3))
    rows.push(array([1]), gradients_of(array([1]), 1), 0.1, 1, clock=1)
    values = torch.arange(2.0 * DIM).reshape(2, DIM)
    rows.assign(array([1, 2**40]), values)
    assert torch.equal(rows.pull(array([2**40, 1])), values.double().flip(0))
    assert (whole(rows.state())["rows"][:, DIM:] == 0.1).all() and rows.memory()["waiting"] == 0


def test_ids_outside_of_the_table_and_states_of_another_are_refused():
    rows = table(num_rows=10)
    for ids in ([10], [-1]):
        with pytest.raises(ValueError, match=str(ids[0])):
            rows.pull(array(ids))
    for other in (table("sgd"), table(dtype=torch.float32)):
        with pytest.raises(ValueError, match="user"):
            rows.load(whole(other.state()), lambda ids: np.ones(len(ids), dtype=bool))
    assert rows.pull(array([])).shape == (0, DIM) and len(rows) == 0


def test_count_admits_from_the_kth_push_on():
    rows = table("sgd", admission=Count(3))
    one = torch.ones(1, DIM, dtype=torch.float64)
    for push in (1, 2):
        rows.push(array([7]), one, 0.5, push, clock=push)
        assert len(rows) == 0 and rows.dropped == push
        assert torch.equal(rows.pull(array([7])), drawn([7]))  # pulls count as nothing
    for push in (3, 4):
        rows.push(array([7]), one, 0.5, push, clock=push)
        assert torch.allclose(rows.pull(array([7])), drawn([7]) - 0.5 * (push - 2))
    assert len(rows) == 1 and rows.dropped == 2 and rows.memory()["waiting"] == 0


def test_counters_are_saved_and_forgotten_with_age():
    def pushed_once() -> SparseTable:
        rows = table(admission=Count(2))
        rows.push(array([3]), gradients_of(array([3]), 1), 0.1, 1, clock=4)
        return rows

    resumed = table(admission=Count(2))
    resumed.load(whole(pushed_once().state()), lambda ids: np.ones(len(ids), dtype=bool))
    aged = pushed_once()
    aged.shrink(older_than=5)
    for rows, admitted in ((resumed, 1), (aged, 0)):
        rows.push(array([3]), gradients_of(array([3]), 2), 0.1, 2, clock=5)
        assert len(rows) == admitted


def test_probability_admits_at_its_rate_and_each_push_anew():
    n, p = 20_000, 0.3
    ids = np.random.default_rng(1).choice(2**50, n, replace=False)
    rows = table("sgd", admission=Probability(p))
    left, before = n, 0
    for step in range(1, 5):
        rows.push(ids, torch.zeros(n, DIM, dtype=torch.float64), 0.1, step, clock=step)
        admitted = len(rows) - before
        assert abs(admitted - left * p) < 4 * (left * p * (1 - p)) ** 0.5  # four deviations of the binomial
        left, before = left - admitted, len(rows)


def test_who_is_admitted_differs_between_seeds_and_tables():
    ids = array(range(2000))

    def admitted(seed: int, name: str) -> set[int]:
        rows = SparseTable(name, 1, torch.float32, seed, INIT, kernel("sgd"), admission=Probability(0.5))
        rows.push(ids, torch.zeros(2000, 1), 0.1, 1, clock=1)
        return set(whole(rows.state())["ids"].tolist())

    first = admitted(0, "user")
    assert first == admitted(0, "user")
    for other in (admitted(1, "user"), admitted(0, "item")):
        assert 400 < len(first & other) < 600  # half of a half, as independent draws would


@pytest.mark.parametrize("make", [lambda: Count(0), lambda: Probability(0), lambda: Probability(1.1)])
def test_impossible_admissions_are_refused(make):
    with pytest.raises(ValueError):
        make()
