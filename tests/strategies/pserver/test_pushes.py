"""What a server refuses of a push or a pull changes nothing; what it takes, it takes once, wherever it was before."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.strategies.pserver.harness import DIM, Bare, Cluster, Sum, config
from trainer.errors import RunFailed
from trainer.optim.schedules import Plateau
from trainer.strategies.pserver.protocol.messages import Kind, Message, Record, Verb, text

ONE = np.array([3])


@pytest.fixture
def alone() -> Iterator[tuple[Cluster, Bare]]:
    """A server in async mode, and its only worker."""
    with Cluster(config("async", 1)) as cluster:
        worker = Bare(cluster, 0)
        worker.begin()
        yield cluster, worker
        worker.die()


def refused(worker: Bare, message: Message, why: str) -> None:
    with pytest.raises(RunFailed, match=why):
        worker.client.wait([worker.client.ask(0, message)])


def work(message: Message, *rows: tuple[int, int, int, int]) -> Message:
    """The same push, of these batches of leased work."""
    message.records.append(Record(Kind.WORK, np.array(rows)))
    return message


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["dense", "rows"])
def test_values_that_are_not_finite_are_refused_by_name(alone: tuple[Cluster, Bare], bad: float, where: str) -> None:
    cluster, worker = alone
    dense = np.array([1.0, 2.0, bad, 4.0]) if where == "dense" else np.ones(4)
    [message] = worker.gradient(dense, np.array([3, 5]), 1.0, -1.0, clock=1)
    if where == "rows":
        message.records[-1].array[1, 2] = bad
    message.sequence = 1
    name = "p0" if where == "dense" else "table rows, row 5"
    refused(worker, message, f"server 0 refused PUSH of worker 0: values of {name} are not finite")
    [server] = cluster.servers
    assert server.parameters.version == 0 and server.statistics()["nonfinite"] == 1
    vectors, rows = worker.look(Sum.IDS)
    assert not vectors.any() and not any(rows.values())


def test_finite_values_whose_sum_overflows_are_taken(alone: tuple[Cluster, Bare]) -> None:
    _, worker = alone
    worker.client.wait(worker.client.push(worker.gradient(np.full(4, 1.7e308), ONE, 1.0, -1.0, clock=1)))
    assert (worker.look(ONE)[0] == 1.7e308).all()


def test_values_that_are_not_finite_are_applied_where_that_is_asked_for() -> None:
    with Cluster(config("async", 1, on_nonfinite="apply")) as cluster:
        worker = Bare(cluster, 0)
        worker.begin()
        worker.client.wait(worker.client.push(worker.gradient(np.array([np.inf, 1, 1, 1]), ONE, 1.0, -1.0, clock=1)))
        assert worker.look(ONE)[0][0, 0] == np.inf
        worker.die()


def start(dense: np.ndarray, rows: np.ndarray | None = None, last: bool = True, **changed: float) -> list[Message]:
    """START of four elements ``p0`` and of a table, whose rows 3 and 5 follow in a second message."""
    table = {"number": 1, "name": "rows", "dim": DIM, "rows": 1000, "init": "zeros", "scale": changed.get("scale", 0.0)}
    told = {"dtype": "float32", "pieces": [["p0", 0, 4]], "tables": [table | {"lr": changed.get("lr", 1.0)}]}
    told |= {"last": rows is None, "groups": [[4, changed.get("group", 1.0), True]]}
    made = [Message(Verb.START, records=[text(told), Record(Kind.DENSE, dense)])]
    if rows is not None:
        more = Record(Kind.IDS, np.array([3, 5]), 1), Record(Kind.ROWS, rows, 1)
        made.append(Message(Verb.START, records=[text({"last": True}), *more]))
    return made


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e39])  # float32 has no 1e39
@pytest.mark.parametrize("where", ["dense", "rows"])
def test_start_that_is_not_finite_is_refused_by_name(bad: float, where: str) -> None:
    dense, rows = np.ones(4), np.ones((2, DIM))
    (dense if where == "dense" else rows[1])[2] = bad
    name = "p0" if where == "dense" else "table rows, row 5"
    with Cluster(config("async", 1)) as cluster:
        worker, [server] = Bare(cluster, 0), cluster.servers
        *good, wrong = start(dense, None if where == "dense" else rows)
        worker.client.wait([worker.client.ask(0, message) for message in good])
        refused(
            worker,
            wrong,
            rf"server 0 refused START of worker 0: values of {name} are not finite \(strategy.on_nonfinite=refuse\)",
        )
        assert not server.parameters.ready and server.statistics()["nonfinite"] == 1
        assert server.parameters.shard is None or len(server.parameters.shard.tables[1]) == 0
        worker.die()


def test_start_that_is_not_finite_is_taken_where_that_is_asked_for() -> None:
    with Cluster(config("async", 1, on_nonfinite="apply")) as cluster:
        worker = Bare(cluster, 0)
        for message in start(np.array([1.0, np.nan, 1.0, 1.0]), np.full((2, DIM), np.inf)):
            worker.client.wait([worker.client.ask(0, message)])
        vectors, rows = worker.look(np.array([3, 5]))
        assert np.isnan(vectors[0]).tolist() == [False, True, False, False] and rows == {3: np.inf, 5: np.inf}
        assert cluster.servers[0].statistics()["nonfinite"] == 0
        worker.die()


@pytest.mark.parametrize("which", ["scale", "lr", "group"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_start_with_a_rate_or_a_scale_that_is_not_finite_is_refused(which: str, bad: float) -> None:
    name = "the group of 4 elements" if which == "group" else "table rows"
    with Cluster(config("async", 1, on_nonfinite="apply")) as cluster:
        worker = Bare(cluster, 0)
        [message] = start(np.ones(4), **{which: bad})
        refused(worker, message, f"refused START of worker 0: the rate or scale of {name} is {bad}")
        assert cluster.servers[0].statistics()["nonfinite"] == 1
        worker.die()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
@pytest.mark.parametrize("choice", ["refuse", "apply"])
def test_norm_by_which_no_step_can_be_clipped_is_refused(bad: float, choice: str) -> None:
    """With NaN the step would be taken as if it were short, with -1 the other way. Where values that are not finite are
    applied, their norm is none either."""
    with Cluster(config("sync", 1, clip_norm=1.0, on_nonfinite=choice)) as cluster:
        worker, [server] = Bare(cluster, 0), cluster.servers
        worker.begin()
        worker.client.wait(worker.client.push(worker.gradient(np.full(4, 3.0), ONE, 0.0, -1.0, clock=1)))
        commit = Message(Verb.COMMIT, clock=0, records=[Record(Kind.NUMBERS, np.array([bad]))])
        if choice == "apply" and bad != -1:
            worker.client.wait([worker.client.ask(0, commit)])
            assert server.parameters.version == 1
        else:
            why = "COMMIT with the norm -1" if bad == -1 else "the norm of the gradient is not finite"
            refused(worker, commit, f"server 0 refused COMMIT of worker 0: {why}")
            assert server.parameters.version == 0 and server.statistics()["nonfinite"] == (bad != -1)
            good = Message(Verb.COMMIT, clock=0, records=[Record(Kind.NUMBERS, np.array([6.0]))])
            worker.client.wait([worker.client.ask(0, good)])
            assert worker.look(ONE)[0][0] == pytest.approx([0.5] * 4), "gradients of 3 whose norm is 6, clipped to 1"
        worker.die()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scale_of_a_schedule_that_is_not_finite_is_refused(bad: float) -> None:
    run = config("async", 1)
    run["config"]["scheduler"] = {"_target_": "trainer.optim.schedules.Plateau"}
    with Cluster(run) as cluster:
        worker, [server] = Bare(cluster, 0), cluster.servers
        worker.begin()
        assert isinstance(server.parameters.shard.schedule, Plateau)
        refused(
            worker, Message(Verb.RATE, records=[text({"scale": bad})]), f"refused RATE of worker 0: a rate of {bad}"
        )
        assert server.parameters.shard.schedule.scale == 1.0
        worker.die()


def test_work_that_is_applied_in_part_is_refused_as_a_whole(alone: tuple[Cluster, Bare]) -> None:
    cluster, worker = alone
    pushes = [(1, (0, 0, 0, 2)), (2, (0, 0, 1, 3)), (3, (0, 0, 2, 3))]
    for sequence, rows in pushes:
        [message] = worker.gradient(np.ones(4), ONE, 1.0, -1.0, clock=sequence)
        message.sequence = sequence
        if sequence == 2:
            refused(worker, work(message, rows), "applied in part")
        else:
            worker.client.wait([worker.client.ask(0, work(message, rows))])
    assert cluster.servers[0].count["pushes"] == 2 and (worker.look(ONE)[0] == 2.0).all()


def test_push_of_an_earlier_epoch_counts_as_applied(alone: tuple[Cluster, Bare]) -> None:
    """It was sent again, and came after the next epoch had begun here."""
    cluster, worker = alone
    for sequence, epoch in ((1, 1), (2, 0)):
        [message] = worker.gradient(np.full(4, 10.0**sequence), ONE, 1.0, -1.0, clock=sequence)
        message.sequence = sequence
        [answer] = worker.client.wait([worker.client.ask(0, work(message, (epoch, 0, 0, 1)))])
        assert answer.verb == Verb.DONE
    [server] = cluster.servers
    assert (worker.look(ONE)[0] == 10.0).all() and worker.look(ONE)[1] == {3: 1.0}
    assert (server.count["pushes"], server.count["duplicates"]) == (1, 1)
    assert server.work.progress.state() == {"epoch": 1, "applied": {"0": [(0, 1)]}}
